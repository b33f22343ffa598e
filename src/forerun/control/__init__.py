"""How much to draft, with what, and when not to: costs, acceptance and the choice among proposals."""
