"""Section `device_config`."""

from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.kinds import Kind
from llm_serving.config.rules import boolean, choice, integer, memory, option, path, text
from llm_serving.core.enums import ExactnessName


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Section `device_config`: the device and MindSpore's settings; a MindFormers `context` fills it."""

    device_target: str = option("CPU", choice(("CPU", "Ascend")))
    """`CPU` or `Ascend`."""

    num_threads: int | None = option(None, integer(1, 1024))
    """Threads of each WorkAgent's kernels. None: the cores divided by the number of WorkAgents."""

    max_device_memory: int | None = option(None, memory())
    """Bytes that weights and KV cache of one WorkAgent may take, or text such as "2GB" (one GB is 2**30 bytes). None:
    on a CPU half of the free memory, divided by the WorkAgents of the machine; on Ascend nine tenths of what is free on
    the device."""

    kernels: str = option("auto", choice(("auto", "program", "primitives", "plain", "plugin")))
    """What computes on a CPU. `program` (`plugin` in older files): one operator of our library runs the whole network.
    `primitives`: the graph that Ascend would run, answered by our library. `plain`: MindSpore's own operations, slower.
    `auto`: the first that works."""

    exactness: str = option("exact", choice(tuple(ExactnessName), {"paged": "exact", "flash": "fast"}))
    """What may be given up for speed, of the graph of primitives. `exact`: PagedAttention computes every step; on
    Ascend its last bits still depend on the shape of the batch, so the same bytes are not promised there. `fast`:
    FlashAttentionScore computes steps of whole prompts; on Ascend its last bits may differ from those of
    PagedAttention, so that an answer also depends on what its prompt shared a step with. The log says at the start what
    is promised."""

    enable_graph_kernel: bool = option(False, boolean())
    """MindSpore's graph kernel fusion. Not on Ascend: infer boost, which PagedAttention needs there, excludes it. On a
    CPU without effect: it takes graphs of fixed shapes there."""

    graph_kernel_flags: str = option("", text())
    """Flags of the fusion, as MindSpore writes them: "--enable_parallel_fusion=true ..."."""

    save_graphs: bool = option(False, boolean())
    """Write the compiled graphs into `save_graphs_path`."""

    save_graphs_path: Path = option(Path("graph"), path(Kind.MADE_FOLDER))
    """Folder for the graphs; relative to the folder the server was started in."""

    jit_level: str = option("O0", choice(("O0", "O1", "O2")))
    """Optimisation level of MindSpore's graph compiler. O0, the only one on Ascend, runs kernel by kernel."""
