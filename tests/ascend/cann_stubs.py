"""Builds stubs of CANN's shared objects, with which MindSpore's Ascend plugin runs on a machine without a device.

MindSpore's x86 wheel contains the whole plugin and the host code of its kernels; only CANN is missing. The stubs define
every symbol that the plugin asks of CANN: `cann_stubs.cc` and `hccl_stubs.cc` implement some, and every other one
returns 0. Shape inference, selection of kernels, checks of arguments and tiling then run as on a device. Results mean
nothing, except those of copies and collectives.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
KNOWN_VERSIONS: Final = ("2.10.0",)
"""Versions of MindSpore for which the list of symbols was checked."""

SOURCES: Final = ("cann_stubs.cc", "hccl_stubs.cc")
RUNTIME: Final = "all_symbols"
LIBRARIES: Final = (
    "acl_op_compiler acl_tdt_channel acl_tdt_queue alog ascend_hal ascend_ml ascendalog ascendcl atb c_sec "
    "error_manager exe_graph ge_runner graph hccl lowering metadef mmpa msprofiler msprofiler_fwk nnopbase opapi "
    "platform profapi register runtime slog static_mmpa tiling_api unified_dlog "
    # of MindSpore before 2.9
    "acl_dvpp_mpi acl_dvpp_op aoe_executor cann_kb compress d_collective host_cpu_engine opskernel slice"
).split()
"""Names of CANN's shared objects. Each is a link to the one that has all symbols."""

SYSTEM_LIBRARIES: Final = ("c", "m", "stdc++", "gcc_s", "gomp", "dl", "pthread", "rt", "z")
_LOOKED_UP: Final = ("acl", "Hccl", "hccl", "hal", "drv", "rt", "Msprof")
"""Prefixes of symbols that the plugin looks up by name at run time, so that `nm` does not list them."""

_OPERATOR: Final = re.compile(r"aclnn[A-Za-z0-9]+")
_NOT_OF_CANN: Final = re.compile(r"GOMP|omp_|__|_ITM_|_ZT[HW]|half_|_ZNK?9mindspore|hi_|rt_|rtswitch|_?Py")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REGISTERS: Final = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
"""Registers of the first six arguments of a call."""

_TEXT: Final = re.compile(rb"[\x20-\x7e]+")


def reason_not_to_build() -> str | None:
    """Return why the stubs cannot be built here; None where they can."""
    if platform.machine() != "x86_64":
        return f"the Ascend plugin runs here on x86_64 only, not on {platform.machine()}"
    missing = [tool for tool in ("g++", "nm") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    return None


def unknown_version() -> str | None:
    """Return what is wrong with the installed version of MindSpore; None if the stubs know it."""
    installed = version("mindspore")
    if installed in KNOWN_VERSIONS:
        return None
    return f"MindSpore must be {' or '.join(KNOWN_VERSIONS)} for the stubs of CANN. Installed: {installed}"


def build(folder: Path) -> dict[str, str]:
    """Build the stubs in a new folder `cann` of `folder`; takes about five seconds.

    MindSpore derives CANN's folder from the path of the shared object with its symbols, in which it searches "cann".

    Args:
        folder: Its path should not contain "cann" itself.

    Returns:
        Environment variables with which a process finds them.

    Raises:
        RuntimeError: The compiler failed; with what it printed.
    """
    folder = folder / "cann"
    folder.mkdir()
    plugins = _plugins()
    objects = []
    for source in SOURCES:
        objects.append(f"{Path(source).stem}.o")
        options = "-O1", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=0"
        _run("g++", *options, "-c", str(HERE / source), "-o", objects[-1], at=folder)
    own = _symbols([folder / each for each in objects], "--defined-only")
    texts = set().union(*map(_texts, plugins))
    operators = sorted({text.removesuffix("GetWorkspaceSize") for text in texts if _OPERATOR.fullmatch(text)})
    undefined = _symbols(plugins, "--dynamic", "--undefined-only") - _provided(plugins)
    undefined |= texts
    of_operators = {name for each in operators for name in (each, f"{each}GetWorkspaceSize")}
    empty = {name for name in undefined if _IDENTIFIER.fullmatch(name) and not _NOT_OF_CANN.match(name)}
    (folder / "generated.s").write_text(_assembly(sorted((empty | set(operators)) - own), operators, of_operators))
    _run("g++", "-c", "generated.s", "-o", "generated.o", at=folder)
    libraries = folder / "lib64"
    (libraries / "driver").mkdir(parents=True)
    _link(libraries / f"lib{RUNTIME}.so", *objects, "generated.o", "-lrt", at=folder)
    for file in *(libraries / f"lib{name}.so" for name in LIBRARIES), libraries / "driver" / "libascend_hal.so":
        file.symlink_to(libraries / f"lib{RUNTIME}.so")
    for data in ("data", "runtime/data", "x86_64-linux/data"):
        shutil.copytree(HERE / "platform_config", folder / data / "platform_config")
    (folder / "opp").mkdir()
    package = folder / "python" / "hccl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sys_version.py").write_text('__sys_version__ = "0.1.0"\n')
    _link(folder / "processors.so", str(HERE / "processors.cc"), at=folder)
    return {
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_TOOLKIT_HOME": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'driver'}",
        "LD_PRELOAD": str(folder / "processors.so"),
        "PYTHONPATH": str(folder / "python"),
    }


def invariant_products(folder: Path) -> dict[str, Any]:
    """Make `ms_custom_ops` and its CANN package in `folder`. The product is MindSpore's own.

    Returns:
        Fields of a `forks.Request` with which a process finds both.
    """
    package, kernels = folder / "packages" / "ms_custom_ops", folder / "custom_batchinvariant"
    package.mkdir(parents=True)
    kernels.mkdir()
    (package / "__init__.py").write_text("from mindspore import ops\n\nmatmul_batch_invariant = ops.MatMul()\n")
    return {"packages": str(package.parent), "environment": {"ASCEND_CUSTOM_OPP_PATH": str(kernels)}}


def _plugins() -> list[Path]:
    """Return MindSpore's shared objects that ask something of CANN."""
    found = find_spec("mindspore")
    assert found is not None and found.origin is not None
    plugin = Path(found.origin).parent / "lib" / "plugin"
    kernels = plugin / "ascend" / "ms_kernels_internal"
    return [
        plugin / "libmindspore_ascend.so.2",
        plugin / "libmindspore_ops_ascend.so",
        *sorted((plugin / "ascend").glob("*.so")),
        *sorted((kernels / "internal_kernel" / "lib").glob("*.so")),
        *sorted((kernels / "asdops" / "lib").glob("*.so")),
        *sorted((plugin / "ascend" / "ms_kernels_symmetric_memory").glob("**/lib/*.so")),
    ]


def _provided(plugins: Sequence[Path]) -> set[str]:
    """Return the symbols that the plugins, MindSpore itself and the system's libraries define."""
    package = plugins[0].parents[2]
    own = [*(package / "lib").glob("*.so*"), *package.glob("_c_expression*.so")]
    system = [path for name in SYSTEM_LIBRARIES if (path := _system_library(name)) is not None]
    return _symbols([*plugins, *own, *system], "--dynamic", "--defined-only")


def _system_library(name: str) -> Path | None:
    file = ctypes.util.find_library(name)
    if file is None:
        return None
    folders = "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib"
    return next((path for folder in folders if (path := Path(folder) / file).exists()), None)


def _symbols(files: Iterable[Path], *options: str) -> set[str]:
    """Return the names that `nm` lists, without versions and without undefined weak symbols."""
    rows = (line.split() for line in _run("nm", "--format=posix", *options, *map(str, files)).splitlines())
    return {row[0].partition("@")[0] for row in rows if len(row) > 1 and row[1] not in "wv"}


def _texts(file: Path) -> set[str]:
    """Return the texts of a file that may be names of `_LOOKED_UP`.

    Each prefix is searched by itself, because a regular expression for any text takes seconds for 100 MB.
    """
    data, found = file.read_bytes(), set[str]()
    for beginning in map(str.encode, _LOOKED_UP):
        at = data.find(beginning)
        while at >= 0:
            text = _TEXT.match(data, at)
            assert text is not None
            whole = at == 0 or not _TEXT.match(data, at - 1, at)
            if whole and len(text[0]) >= 5 and _IDENTIFIER.fullmatch(name := text[0].decode()):
                found.add(name)
            at = data.find(beginning, text.end())
    return found


def _assembly(empty: Iterable[str], operators: Sequence[str], of_operators: set[str]) -> str:
    """Return the assembly of functions that return 0, and of each operator's `GetWorkspaceSize`, which sets executors.

    The arguments of a call stand in six registers and above the return address; `fake_workspace_size` gets the name of
    the operator, the address of a copy of the registers and that of the others.
    """
    lines = [".text"]
    for name in empty:
        if name not in of_operators or not name.endswith("GetWorkspaceSize"):
            lines += [f".globl {name}", f".type {name},@function", f"{name}: xor %eax,%eax", "xor %edx,%edx", "ret"]
    for name in operators:
        function = f"{name}GetWorkspaceSize"
        lines += [f".globl {function}", f".type {function},@function", f"{function}: lea 8(%rsp),%rax", "sub $56,%rsp"]
        lines += [f"mov %{register},{8 * index}(%rsp)" for index, register in enumerate(_REGISTERS)]
        lines += [f"lea .L{name}(%rip),%rdi", "mov %rsp,%rsi", "mov %rax,%rdx"]
        lines += ["call fake_workspace_size@plt", "add $56,%rsp", "ret"]
    lines += [".section .rodata", *(f'.L{name}: .asciz "{name}"' for name in operators)]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _link(target: Path, *arguments: str, at: Path) -> None:
    _run("g++", "-shared", "-fPIC", *arguments, "-o", str(target), f"-Wl,-soname,{target.name}", at=at)


def _run(*command: str, at: Path | None = None) -> str:
    environment = os.environ | {"LC_ALL": "C"}
    ended = subprocess.run(command, cwd=at, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with {ended.returncode}: {ended.stderr[-3000:]}")
    return ended.stdout
