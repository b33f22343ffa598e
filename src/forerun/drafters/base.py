"""What a drafter is.

Three things, by how long they live. `DrafterOptions` are what a user wrote. A `DrafterSource` belongs to a loaded
target: it holds what requests share, such as a second model or an index of past outputs. A `Drafter` belongs to one
request: it is opened with the request, hears of every token that is emitted, and is closed with it. Nobody here
decides: a drafter proposes, `control` chooses among proposals, `verify` judges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from forerun.models.bound import BindSettings, BoundModel
from forerun.models.grammar import GrammarState
from forerun.models.tokenizer import Tokenizer
from forerun.ops.base import Executor
from forerun.sampling.distribution import RowSampler
from forerun.types import Draft, DraftTraits, ForwardOutput, Int32Array, NoiseStream, SamplingParams

Policy = Literal["adaptive", "fixed"]


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model that is drafted for, as a source may know it. Set when the model is loaded.

    Attributes:
        executor: the bound model.
        sampler: makes laws of its logits and draws from them.
        tokenizer: text to ids and back.
        vocab_size: ids are below this.
        max_model_len: tokens of prompt and output at most.
        settings: how it was bound; a second model is bound likewise.
        model: what the executor runs, for drafters that run parts of it; None where it has no parts.
        datastore: reads the texts that the model wrote beforehand, as token ids; none where it has no datastore. Raises
            LoadError for a damaged one.
    """

    executor: Executor
    sampler: RowSampler
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    settings: BindSettings
    model: BoundModel | None = None
    datastore: Callable[[], Sequence[Int32Array]] = tuple


class TargetSlots(Protocol):
    """A request's place in the target's cache, for a drafter that runs the target's own weights. Set by the engine.

    Such a drafter may write the slots from cached_len on, all of which it must count as garbage in the next step: the
    target's pass writes them anew, and what lies behind that is nobody's.

    Attributes:
        cached_len: the target has written the keys and values of the committed tokens [0, cached_len).
    """

    cached_len: int

    @property
    def page_table(self) -> Int32Array:
        """[P] int32, the pages that hold the slots, in their order."""

    def try_reserve(self, num_slots: int) -> bool:
        """Whether slots [0, num_slots) have pages, once those that are missing have been asked for."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know of its request. Set by the engine.

    Attributes:
        prompt_token_ids: the prompt, not empty.
        end_ids: ids that end the output, so that nothing can follow them.
        params: the request's parameters; a drafter that samples may follow their law.
        noise_key: key of the request's noise.
        stream: the noise that sampled nodes must be drawn from, by the request's verification rule.
        max_len: tokens of prompt and output at most.
        prediction: ids of a text the caller expects, empty without one.
        salt: requests of one salt may learn from each other; others must not.
        slots: its place in the target's cache; None where no target runs.
        grammar: how far the output is in the grammar that it must keep to; None without one. The engine advances it.
    """

    prompt_token_ids: Sequence[int]
    end_ids: frozenset[int]
    params: SamplingParams
    noise_key: int
    stream: NoiseStream
    max_len: int
    prediction: tuple[int, ...] = ()
    salt: str = ""
    slots: TargetSlots | None = None
    grammar: GrammarState | None = None

    @property
    def partition(self) -> str:
        """Where requests of this salt keep what they share: a digest, for a salt may be long, or a key to forget."""
        return hashlib.sha256(self.salt.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Budget:
    """What a proposal may be. Set by the controller for each step.

    Attributes:
        max_nodes: nodes at most, at least 1.
        min_survivals: one per node, in the order in which they are drafted: a draft step pays only if the node that it
            adds survives with at least this probability. The nodes of drafters whose steps cost nothing are chosen
            among afterwards; for them it is what the likeliest must reach for any draft to pay.
        rate: estimated acceptance of a node, given its parent's, by acceptance cell.
    """

    max_nodes: int
    min_survivals: Sequence[float]
    rate: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter proposes for one step.

    Attributes:
        draft: the nodes.
        cells: per node its cell of the source's acceptance table: nodes of a cell are right about equally often.
        num_steps: draft passes it took; 0 for drafters without a model. Passes that only caught up don't count.
        steps_s: seconds of these passes.
    """

    draft: Draft
    cells: tuple[int, ...]
    num_steps: int = 0
    steps_s: float = 0.0


NOTHING = Proposal(Draft(), ())


class Drafter(Protocol):
    """Proposes tokens for one request."""

    def propose(self, budget: Budget) -> Proposal:
        """Proposes what may follow the committed tokens.

        Returns:
            A tree of at most budget.max_nodes nodes, empty when there is nothing to propose.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that are committed now; called once per step, also where nothing was proposed."""

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Sees a target pass before its tokens are committed; called only where the source `reads_rows`.

        Args:
            draft: what was verified, by whomever proposed.
            rows: row 0 is the last committed token's, row 1 + i that of node i.
        """

    def close(self) -> None:
        """The request is over, finished or not."""


class DrafterSource(Protocol):
    """A drafter bound to a target, with what its requests share.

    Attributes:
        name: of the drafter, for records.
        policy: `fixed` proposals are verified whole, of `adaptive` ones what pays.
        priors: starting acceptance of each cell.
        reads_rows: whether its drafters want to see the target's rows, logits included: a pass whose logits nobody
            else reads must make them all the same.
        is_free: whether a proposal costs next to nothing, so that it is always asked for.
    """

    name: str
    policy: Policy
    priors: tuple[float, ...]
    reads_rows: bool
    is_free: bool

    def open(self, context: DraftContext) -> Drafter | None:
        """A drafter for one request; None where it would never propose anything.

        Raises:
            RequestError: the request asks for something this drafter can't do.
        """

    def clear(self) -> None:
        """Forgets what earlier requests left behind."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held for all requests together."""


class DrafterOptions(Protocol):
    """Settings of one drafter: a frozen dataclass of int, float and str fields, which are the keys of its spec.

    Attributes:
        name: as it is written in a spec.
        summary: what it proposes, in a few words.
        needs: what must be there beside the target: `nothing`, a second model, trained weights.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[str]

    @property
    def is_off(self) -> bool:
        """Whether the settings say that nothing is proposed."""

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """What its drafts are like when nodes are to be sampled from a stream, see `DraftContext.stream`."""

    def bind(self, target: DraftTarget) -> DrafterSource:
        """The drafter for a loaded target.

        Raises:
            ConfigError: the drafter does not fit the target.
            LoadError: a file it needs can't be read.
        """


class UnsampledOptions:
    """What the settings of drafters share that find their tokens and never sample one; `k` tokens at most."""

    __slots__ = ()
    k: int

    @property
    def is_off(self) -> bool:
        """Whether nothing would ever be proposed."""
        return self.k == 0

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """Nothing is sampled."""
        return DraftTraits()
