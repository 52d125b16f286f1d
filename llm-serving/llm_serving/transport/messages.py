"""All messages between master and WorkAgent.

master                                 WorkAgent
  |  <- Attach(token) -----------------  |   only over TLS, from another machine; `token` says which start it belongs to
  |  -- Hello(version) --------------->  |
  |  <- Welcome(version, pid, ...) ----  |
  |  -- LoadModel(settings) ---------->  |
  |  <- Progress(text) ... ------------  |
  |  <- Loaded(num_blocks, ...) -------  |   or Failed(error)
  |  -- RunStep(step, buffer, shapes) ->  |   strictly in order, at most `num_buffers` unanswered
  |  -- SetAllowedTokens(step, shapes) >  |   if RunStep has `allowed_follow`; before any later RunStep
  |  <- StepEnding(step) --------------  |   if RunStep has `announce_ending` and the step does not fail first
  |  <- StepDone(step, ...) -----------  |   or StepFailed(step, error)
  |  -- Propose(requests) ------------>  |   if there is a draft model; only while no step is in flight
  |  <- Proposed(token_ids, error) ----  |
  |  -- DropCache --------------------->  |   only while no step is in flight; no reply
  |  -- LoadAdapter(number, folder) -->  |   at any time; no reply
  |  -- Shutdown ---------------------->  |

A second connection transfers KV blocks between machines; replies come in the order of the requests:

  |  <- Attach(token) -----------------  |
  |  -- ReadBlocks(blocks) ----------->  |
  |  <- BlockContents(blocks, ...) ----  |   or BlocksRefused(error)
  |  -- BlockContents(blocks, ...) --->  |
  |  <- BlocksWritten(blocks) ---------  |   or BlocksRefused(error)
  |  -- LoadBlocks(hashes, blocks) --->  |   if there is a disk cache
  |  <- BlocksLoaded(num_stored, ...) -  |   or BlocksRefused(error)
  |  -- StoreBlocks(hashes, blocks) -->  |
  |  <- BlocksStored(num_bytes, ...) --  |   or BlocksRefused(error)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from llm_serving.config.sections.device import CacheConfig, DeviceConfig, QuantConfig
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.fingerprint import UNKNOWN_FINGERPRINT, ComputeFingerprint
from llm_serving.core.step import DraftRequest
from llm_serving.core.window import LayerWindow

PROTOCOL_VERSION = 27

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of a step's arrays. Their types are fixed (`transport.codec`)."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    version: int


class Attach(msgspec.Struct, tag="attach", frozen=True):
    token: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    version: int
    pid: int
    code_fingerprint: str


class LoadModel(msgspec.Struct, tag="load_model", frozen=True):
    """What a WorkAgent needs to load its model: sections of the configuration, and values derived from other sections.
    `device.num_threads` and `pa.disk_cache_path` have the values for the WorkAgent's machine.
    """

    model: ModelConfig
    pa: CacheConfig
    device: DeviceConfig
    quant: QuantConfig
    lora: LoraConfig
    max_num_batched_tokens: int
    device_id: int
    num_agents: int
    num_buffers: int
    buffer_bytes: int
    step_timeout_s: float
    draft_model_path: Path | None
    uses_mtp: bool
    num_transfer_blocks: int
    num_ranks: int
    rank_table: Path | None
    memory_share: float
    log_name: str
    groups_layers: bool
    """Whether layers with the same window may form a group with its own block tables. If not, all form one group."""
    rank: int = 0
    has_group_blocks: bool = False
    """Whether `pa.num_blocks` and `pa.num_swap_blocks` count blocks of a group of layers, not blocks of all layers."""

    def with_blocks(self, num_blocks: int | None, num_swap_blocks: int) -> LoadModel:
        """Return the settings with these numbers of blocks of a group of layers."""
        pa = replace(self.pa, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks)
        return msgspec.structs.replace(self, pa=pa, has_group_blocks=True)


class Progress(msgspec.Struct, tag="progress", frozen=True):
    text: str


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    num_blocks: int
    num_swap_blocks: int
    notice: str
    compute_fingerprint: ComputeFingerprint = UNKNOWN_FINGERPRINT
    block_bytes: int = 0
    """Bytes of a block over all layers of a group, or 0 if they are unknown."""
    model: str = ""
    """Weight fingerprint of the files that a WorkAgent on another machine has read. Empty for the master's files."""
    windows: tuple[LayerWindow, ...] = (LayerWindow(),)


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The model cannot be loaded, or the handshake is refused. The WorkAgent exits."""

    error: str


class RunStep(msgspec.Struct, tag="run_step", frozen=True):
    step: int
    buffer: int
    shapes: Shapes
    announce_ending: bool = False
    allowed_follow: bool = False
    content: bytes = b""
    """The arrays of the step. Empty if they are in the shared buffer."""


class SetAllowedTokens(msgspec.Struct, tag="set_allowed_tokens", frozen=True):
    """The allowed tokens of a step's samples, sent after a `RunStep` with `allowed_follow`."""

    step: int
    shapes: Shapes
    content: bytes = b""
    """The arrays of the allowed tokens. Empty if they are in the step's shared buffer, after the arrays of the step."""


class StepEnding(msgspec.Struct, tag="step_ending", frozen=True):
    """Notice that a step ends soon, so that the master forms the next. Sent at once if the end is unknown."""

    step: int


class StepDone(msgspec.Struct, tag="step_done", frozen=True):
    """Output of a step. The arrays are copied as raw little-endian bytes, so that no later step can overwrite them."""

    step: int
    arrays: tuple[bytes, ...]
    """The arrays of the output (`codec.OUTPUT_DTYPES`). All after the first two are absent if they hold no result."""
    row_errors: dict[int, str]
    num_compilations: int = 0
    """Number of graphs compiled so far. It must not grow after the warm-up."""
    num_vectors: int = 0


class StepFailed(msgspec.Struct, tag="step_failed", frozen=True):
    step: int
    error: str


class Propose(msgspec.Struct, tag="propose", frozen=True):
    requests: list[DraftRequest]


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Request to read an adapter while steps run. Steps that need it wait. An empty `folder` means to drop it."""

    number: int
    folder: str


class Proposed(msgspec.Struct, tag="proposed", frozen=True):
    token_ids: list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]]
    error: str = ""


class ReadBlocks(msgspec.Struct, tag="read_blocks", frozen=True):
    block_ids: list[int]
    epochs: list[int]


class BlockContents(msgspec.Struct, tag="block_contents", frozen=True):
    """KV blocks that the master copies from the shared memory of one machine to the same block ids on another."""

    block_ids: list[int]
    epochs: list[int]
    num_written: list[int]
    content: bytes
    """Keys of all blocks in the first layer, their values, then those of the second layer, and so on."""


class BlocksWritten(msgspec.Struct, tag="blocks_written", frozen=True):
    block_ids: list[int]
    epochs: list[int]


class LoadBlocks(msgspec.Struct, tag="load_blocks", frozen=True):
    """Request to copy KV blocks, found by `hashes`, from disk to the transfer pool, which WorkAgents share."""

    hashes: list[bytes]
    start: int
    block_ids: list[int]
    """Transfer pool blocks to read into, the first for block `start`. Each gets its epoch in `epochs`."""
    epochs: list[int]


class BlocksLoaded(msgspec.Struct, tag="blocks_loaded", frozen=True):
    num_stored: int
    num_read: int
    num_damaged: int
    num_bytes: int


class StoreBlocks(msgspec.Struct, tag="store_blocks", frozen=True):
    hashes: list[bytes]
    block_ids: list[int]
    epochs: list[int]


class BlocksStored(msgspec.Struct, tag="blocks_stored", frozen=True):
    num_written: int
    num_evicted: int
    num_bytes: int
    """Bytes of all files in the folder, or -1 if the folder cannot be used."""


class BlocksRefused(msgspec.Struct, tag="blocks_refused", frozen=True):
    error: str


class DropCache(msgspec.Struct, tag="drop_cache", frozen=True):
    """Request to return the memory of the KV cache to the operating system. Its contents are lost."""


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    pass


MasterMessage = (
    Hello
    | LoadModel
    | RunStep
    | SetAllowedTokens
    | Propose
    | DropCache
    | LoadAdapter
    | ReadBlocks
    | BlockContents
    | LoadBlocks
    | StoreBlocks
    | Shutdown
)
AgentMessage = (
    Attach
    | Welcome
    | Progress
    | Loaded
    | Failed
    | StepEnding
    | StepDone
    | StepFailed
    | Proposed
    | BlockContents
    | BlocksWritten
    | BlocksLoaded
    | BlocksStored
    | BlocksRefused
)
