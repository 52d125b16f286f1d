"""Everything that master and WorkAgent say to each other.

master                                 WorkAgent
  |  <- Arrived(token) ----------------  |   on another machine alone, over TLS: which start it belongs to
  |  -- Hello(version) --------------->  |   here the socket was inherited: nobody else can be at the other end
  |  <- Welcome(version, pid, image) --  |
  |  -- LoadModel(settings) ---------->  |
  |  <- Progress(text) ... ------------  |
  |  <- Loaded(num_blocks, ...) -------  |
  |  -- RunStep(step, buffer, layout) ->  |   strictly in order, at most `num_buffers` unanswered
  |  -- Allow(step, layout) ---------->  |   where RunStep says that it follows; before any later RunStep
  |  <- StepEnding(step) --------------  |   if asked for, and unless the step fails before
  |  <- StepDone(step, ...) -----------  |   or StepFailed(step, error)
  |  -- Propose(continuations) ------->  |   while no step is under way, where there is a draft model
  |  <- Proposed(token_ids, error) ----  |
  |  -- Shutdown ---------------------->  |

By a connection of their own, where blocks move between machines; one question at a time:

  |  <- Arrived(token) ----------------  |
  |  -- SendBlocks(blocks) ----------->  |
  |  <- Blocks(blocks, content) -------  |   or BlocksRefused(error)
  |  -- Blocks(blocks, content) ------>  |
  |  <- BlocksTaken(blocks) -----------  |   or BlocksRefused(error)
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from llm_serving.core.fingerprint import UNKNOWN_FINGERPRINT, ComputeFingerprint
from llm_serving.core.step import Continuation

PROTOCOL_VERSION = 21


class ArrayLayout(msgspec.Struct, array_like=True, frozen=True):
    """Where one array lies in a buffer; the offset follows from those before it."""

    dtype: str
    shape: tuple[int, ...]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    version: int


class Arrived(msgspec.Struct, tag="arrived", frozen=True):
    token: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    version: int
    pid: int
    image: str
    """Hash of the package's files, see `core.image`."""


class LoadModel(msgspec.Struct, tag="load_model", frozen=True):
    """What a WorkAgent needs to know to load its model; all of it from the operator's configuration."""

    model_path: str
    mindir_path: str | None
    mindir_ini: str | None
    dtype: str
    quantization: str | None
    group_size: int
    kv_cache_dtype: str
    implementation: str
    kernels: str
    exactness: str
    block_size: int
    num_blocks: int | None
    num_swap_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    device_target: str
    device_id: int
    num_agents: int
    num_threads: int | None
    max_device_memory: int | None
    enable_graph_kernel: bool
    graph_kernel_flags: str
    save_graphs: bool
    save_graphs_path: str
    jit_level: str
    num_buffers: int
    buffer_bytes: int
    step_timeout_s: float
    draft_model_path: str | None = None
    num_transfer_blocks: int = 0
    """Of the memory by which WorkAgents hand blocks over, all parts together."""
    num_ranks: int = 1
    """WorkAgents that compute the replica together."""
    rank: int = 0
    """Of this one among them."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    text: str


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    num_blocks: int
    num_swap_blocks: int
    notice: str
    """What the operator should know of the way this WorkAgent computes; usually empty."""
    computed_by: ComputeFingerprint = UNKNOWN_FINGERPRINT
    block_bytes: int = 0
    """Of a block, all layers; 0: not known."""
    model: str = ""
    """`weight_fingerprint` of the files read on another machine; empty: the same files as the master's."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The model cannot be loaded or the handshake is refused; the WorkAgent ends."""

    error: str


class RunStep(msgspec.Struct, tag="run_step", frozen=True):
    step: int
    buffer: int
    layout: tuple[ArrayLayout, ...]
    announce_ending: bool = False
    allowed_follow: bool = False
    content: bytes = b""
    """The arrays, where they are not in a buffer."""


class Allow(msgspec.Struct, tag="allow", frozen=True):
    """The tokens that the samples of a step may choose; they stand behind its arrays in its buffer."""

    step: int
    layout: tuple[ArrayLayout, ...]
    content: bytes = b""
    """As of `RunStep`."""


class StepEnding(msgspec.Struct, tag="step_ending", frozen=True):
    """The step will end soon, or nothing tells when: the time to form the next one."""

    step: int


class TopTokensDone(msgspec.Struct, array_like=True, frozen=True):
    """`core.step.TopTokens`, each array as raw little-endian bytes."""

    offsets: bytes
    token_ids: bytes
    logprobs: bytes


class ScoresDone(msgspec.Struct, array_like=True, frozen=True):
    """`core.step.Scores`, in the same way."""

    logprobs: bytes
    ranks: bytes
    top: TopTokensDone


class StepDone(msgspec.Struct, tag="step_done", frozen=True):
    """Arrays as raw little-endian bytes: they are small, and a reply that owns its data cannot be overwritten."""

    step: int
    token_ids: bytes
    logprobs: bytes
    row_errors: dict[int, str]
    num_compilations: int = 0
    """Graphs the WorkAgent has compiled so far; those of its warm-up serve every step, so the number stays."""
    top: TopTokensDone | None = None
    """None where no choice is told with the most likely tokens."""
    scores: ScoresDone | None = None
    """None where nothing was scored."""
    vectors: bytes = b""
    num_vectors: int = 0


class StepFailed(msgspec.Struct, tag="step_failed", frozen=True):
    step: int
    error: str


class Propose(msgspec.Struct, tag="propose", frozen=True):
    continuations: list[Continuation]


class Proposed(msgspec.Struct, tag="proposed", frozen=True):
    token_ids: list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]]
    """What may follow each."""
    error: str = ""
    """Why there is nothing; usually empty."""


class SendBlocks(msgspec.Struct, tag="send_blocks", frozen=True):
    """Blocks of the transfer pool, each with the epoch that must stand beside it."""

    block_ids: list[int]
    epochs: list[int]


class Blocks(msgspec.Struct, tag="blocks", frozen=True):
    """What blocks of a transfer pool hold, for the same place in another one."""

    block_ids: list[int]
    epochs: list[int]
    num_written: list[int]
    """Tokens of each."""
    content: bytes
    """Keys of all of them in the first layer, their values, those of the second layer, and so on."""


class BlocksTaken(msgspec.Struct, tag="blocks_taken", frozen=True):
    block_ids: list[int]
    epochs: list[int]


class BlocksRefused(msgspec.Struct, tag="blocks_refused", frozen=True):
    error: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    pass


MasterMessage = Hello | LoadModel | RunStep | Allow | Propose | SendBlocks | Blocks | Shutdown
AgentMessage = (
    Arrived
    | Welcome
    | Progress
    | Loaded
    | Failed
    | StepEnding
    | StepDone
    | StepFailed
    | Proposed
    | Blocks
    | BlocksTaken
    | BlocksRefused
)
