"""What is handed to the engine, and what it says of itself: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.control.speculator import Speculator
from forerun.engine.request import Request


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and how it is to run.

    Attributes:
        request: what to answer.
        speculator: who drafts; None decodes plainly.
        method: the name of the only drafter to ask; None asks all of the speculator's.
        k: nodes per step at most; None leaves it to the controller.
        priority: lower ones run first, and of equal ones those that came first.
    """

    request: Request
    speculator: Speculator | None = None
    method: str | None = None
    k: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do.

    Attributes:
        num_running: requests that have pages.
        num_waiting: requests that have none yet, or none any more.
        num_pages: of the KV cache.
        num_used_pages: those of them that running requests hold.
        num_kept_pages: those that hold nothing but beginnings of earlier texts.
        num_preemptions: how often a request had to give its pages back, so far.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_used_pages: int
    num_kept_pages: int
    num_preemptions: int
