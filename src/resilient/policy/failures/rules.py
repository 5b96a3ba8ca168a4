"""By which text a failure is known: the table of rules. The first rule that matches a line of a record decides.

A line is what a process has said, or what was seen of its end: ``TypeName: message`` of an exception and of those that
it follows from, the last lines of its stderr, ``process ended by SIGKILL``, ``process ended with exit code 3``,
``kernel: ...`` for counters and messages of the kernel, ``DataLoader: TypeName`` for what was raised in torch's loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from resilient.policy.failures.classes import FailureClass as Is


class Role(StrEnum):
    """What a matching line is in the story of a failure."""

    ROOT = "root"  # it may be what began
    SECONDARY = "secondary"  # it follows from something on another rank, or from what an agent does then
    NEVER = "never"  # advice, or a wrapper's words: no evidence at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Any of ``patterns`` is searched for in each line; ``sure``: that leaves no doubt about the class."""

    failure: Is
    role: Role
    sure: bool
    source: str
    patterns: tuple[str, ...]


def _root(failure: Is, source: str, *patterns: str) -> Rule:
    return Rule(failure=failure, role=Role.ROOT, sure=True, source=source, patterns=patterns)


def _maybe(failure: Is, source: str, *patterns: str) -> Rule:
    return Rule(failure=failure, role=Role.ROOT, sure=False, source=source, patterns=patterns)


def _secondary(failure: Is, source: str, *patterns: str) -> Rule:
    return Rule(failure=failure, role=Role.SECONDARY, sure=False, source=source, patterns=patterns)


def _never(source: str, *patterns: str) -> Rule:
    return Rule(failure=Is.UNKNOWN, role=Role.NEVER, sure=False, source=source, patterns=patterns)


_XID: Final = r"NVRM: Xid \((?:PCI:)?[0-9a-fA-F:.]+\): (?:{}),"

RULES: Final[tuple[Rule, ...]] = (
    # --- advice, and the words of wrappers ----------------------------------------------------------------------------
    _never(
        "torch c10/cuda/CUDAException.cpp",
        r"^(?:CUDA|HIP) kernel errors might be asynchronously reported",
        r"^For debugging consider passing",
        r"^Device-side assertion tracking was not enabled",
        r"^Compile with `?TORCH_USE_(?:CUDA|HIP)_DSA",
        r"^Search for `cuda\w+' in https://",
    ),
    _never("torch ProcessGroupNCCL.cpp", r"^This may indicate a possible application crash on rank 0"),
    _never("torch distributed/elastic/multiprocessing/errors", r"ChildFailedError:", r"^Root Cause \(first observed"),
    # --- what a device, its driver or the kernel says of itself -------------------------------------------------------
    _root(
        Is.DEVICE_HARDWARE,
        "NVIDIA Xid catalog and driver; Azure's node health checks",
        _XID.format("48|63|64|74|79|92|94|95|110|119|120|14[4-9]|150"),
        r"caused by previous Xid (?:14[4-9]|150)\b",
        r"fallen off the bus|GPU is lost",
        r"[Rr]ow remap(?:ping|per)? fail",
    ),
    _root(
        Is.DEVICE_HARDWARE,
        "CUDA driver API, texts of cuGetErrorString",
        r"[Uu]ncorrectable (?:NVLink|ECC) error",
        r"CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable",
        r"hardware stack error",
    ),
    _root(Is.DEVICE_HARDWARE, "ROCm runtime", r"HW Exception by GPU"),
    _root(Is.DEVICE_HARDWARE, "Linux drivers/edac, acpi/apei", r"\[Hardware Error\]", r"EDAC .*\bUE\b"),
    _maybe(Is.DEVICE_DRIVER, "NVIDIA Xid catalog", _XID.format("62|109|121|136|140|143")),
    _root(
        Is.DEVICE_DRIVER,
        "CUDA runtime and driver API, NVML, nvidia-smi",
        r"[Rr]ow remapping?:? (?:is )?pending",
        r"system not yet initialized",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        r"[Dd]river/library version mismatch",
        r"couldn't communicate with the NVIDIA driver",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        r"no CUDA-capable device is detected",
        r"CUDA unknown error",
    ),
    # --- memory -------------------------------------------------------------------------------------------------------
    _root(
        Is.SHARED_MEMORY,
        "torch utils/data/_utils/signal_handling.py, aten MapAllocator.cpp",
        r"insufficient shared memory \(shm\)",
        r"unable to (?:open|mmap|write to|resize|allocate) .*(?:shared memory|</torch_)",
    ),
    _maybe(Is.SHARED_MEMORY, "signal(7)", r"^process ended by SIGBUS", r"killed by signal: Bus error"),
    _maybe(
        Is.SHARED_MEMORY,
        "measured: a worker of a loader dies while it sends",
        r"^DataLoader: (?:ConnectionResetError|EOFError): (?!Caught )",
    ),
    _root(
        Is.ACCELERATOR_OOM,
        "torch c10/cuda/CUDACachingAllocator.cpp; cuBLAS, cuDNN; NCCL src/include/checks.h",
        r"OutOfMemoryError:",
        r"(?:CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory|RESOURCE_EXHAUSTED: Out of memory",
        r"CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
        r"Cuda failure (?:2 )?'out of memory'",
    ),
    _root(
        Is.HOST_OOM,
        "Linux mm/oom_kill.c, cgroup v2 memory.events; Kubernetes; Slurm",
        r"^kernel: oom_kill|Detected \d+ oom_kill event",
        r"[Oo]ut of memory: Killed process|oom-kill:|OOMKilled",
    ),
    _root(
        Is.HOST_OOM,
        "torch c10/core/impl/alloc_cpu.cpp; Python; numpy; C++",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        r"^MemoryError\b|std::bad_alloc|Cannot allocate memory|Unable to allocate .* for an array",
    ),
    _maybe(Is.HOST_OOM, "DLRover's exit codes of pods", r"^process ended with exit code 247$"),
    # --- numbers ------------------------------------------------------------------------------------------------------
    _root(
        Is.NUMERICS,
        "torch autograd/anomaly_mode, nn/utils/clip_grad.py; common training loops",
        r"^FloatingPointError:",
        r"(?i)\bloss (?:is|was|became|=|has become) ?(?:nan|inf|not finite|non-finite)",
        r"(?i)(?:gradient|grad|total norm).*(?:non-finite|\bnan\b|\binf\b)",
        r"returned nan values|assert .*isfinite|non-finite (?:loss|grad)",
        r"(?i:(?:found|unexpected result) (?:nan|inf)\b)",
        r"(?i)loss scale (?:already at minimum|reached)|minimum loss scale",
    ),
    _root(Is.SILENT_CORRUPTION, "this package", r"replicas? (?:digests? )?(?:differ|disagree)"),
    _maybe(Is.STRAGGLER, "this package", r"^straggler: "),
    # --- kernels on the accelerator: as often the program's fault as the device's -------------------------------------
    _root(
        Is.DEVICE_ASSERT, "torch c10/cuda, aten native/cuda", r"device-side assert triggered|: block: \[.*Assertion `"
    ),
    _maybe(
        Is.DEVICE_ASSERT,
        "CUDA runtime API; ByteRobust, table 2: an illegal access is the user's two times of three",
        r"illegal (?:memory access|instruction|address)|misaligned address|unspecified launch failure",
        r"CU(?:BLAS|DNN)_STATUS_EXECUTION_FAILED|Memory access fault by GPU",
        _XID.format("13|31|43|45"),
    ),
    # --- checkpoints; before the storage, since their errors name files, too ------------------------------------------
    _root(
        Is.BAD_CHECKPOINT,
        "torch caffe2/serialize/inline_container.cc, serialization.py; pickle; safetensors; this package",
        r"CorruptError:",
        r"PytorchStreamReader failed|invalid header or archive is corrupted|The file might be corrupted",
        r"EOFError: Ran out of input|pickle data was truncated|storage has wrong size",
        r"SafetensorError: .*(?:header|incomplete)|[Cc]hecksum mismatch",
    ),
    _root(
        Is.USER_ERROR,
        "torch serialization.py, nn/modules/module.py",
        r"Weights only load failed|Error\(s\) in loading state_dict",
    ),
    # --- storage ------------------------------------------------------------------------------------------------------
    _root(
        Is.STORAGE,
        "errno(3); Linux block, ext4, xfs, nfs, lustre",
        r"No space left on device|Disk quota exceeded|Input/output error|Remote I/O error|Read-only file system",
        r"Stale file handle|Host is down|Transport endpoint is not connected",
        r"PytorchStreamWriter failed writing|file write failed",
        r"I/O error, dev \w+|EXT4-fs error|XFS \(\S+\): .*error|nfs: server \S+ not responding|LustreError",
    ),
    _root(
        Is.STORAGE,
        "S3 API; botocore; this package",
        r"(?:^|\.)StoreError:",
        r"SlowDown|ServiceUnavailable|RequestTimeout\b|NoSuchBucket",
        r"EndpointConnectionError|(?:Read|Connect) ?[Tt]imeout on endpoint",
    ),
    _maybe(Is.STORAGE, "torch utils/data/dataloader.py", r"DataLoader timed out after \d+ seconds"),
    # --- the end of a machine, of a job, of somebody's patience -------------------------------------------------------
    _root(
        Is.PREEMPTION,
        "Slurm; notices of clouds",
        r"DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE)|(?:job is|was) preempted|[Ss]pot .*interruption",
    ),
    _root(
        Is.NODE_LOST,
        "Slurm; Kubernetes",
        r"DUE TO NODE FAILURE|NODE_FAIL|NodeNotReady|Node failure on|node has died|is unresponsive as of",
    ),
    _root(
        Is.CANCELLED,
        "Python; Slurm; this package",
        r"\bKeyboardInterrupt\b|^process ended by SIGINT|CANCELLED AT|taken over by",
    ),
    _root(Is.CRASH_LOOP, "this package", r"lives have failed in the same way"),
    # --- hangs --------------------------------------------------------------------------------------------------------
    _root(
        Is.HANG, "this package; Linux kernel/hung_task.c", r"^hang: |blocked for more than \d+ seconds|task:.*state:D "
    ),
    _maybe(Is.HANG, "torch ProcessGroupNCCL.cpp", r"watchdog got stuck for \d+ seconds"),
    _root(Is.FROZEN, "this package", r"^frozen: "),
    # --- misuse that looks like a fault of the network ----------------------------------------------------------------
    _root(
        Is.USER_ERROR,
        "NCCL nccl.h; torch ProcessGroupWrapper.cpp; gloo transport/tcp/pair.cc",
        r"ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU detected",
        r"Detected mismatch between collectives on ranks",
        r"op\.preamble\.length <= op\.nbytes",
        r"EADDRINUSE|[Aa]ddress already in use",
    ),
    # --- what follows from another rank; the class is what it is if nobody else is to blame ---------------------------
    _secondary(
        Is.COORDINATOR_LOST,
        "torch distributed/elastic/rendezvous, TCPStore.cpp, socket.cpp",
        r"Rendezvous(?:Connection|Timeout|State|Closed)\w*Error",
        r"DistNetworkError|DistStoreError|TCPStore|wait timeout after \d+ ?ms, keys",
        r"Failed to recv, got 0 bytes|The (?:client|server) socket has (?:failed|timed out)",
    ),
    _secondary(
        Is.PEER_DIED,
        "NCCL nccl.h; torch NCCLUtils.hpp, ProcessGroupNCCL.cpp",
        r"ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer",
        r"NCCL communicator (?:was|has been) aborted",
    ),
    _secondary(
        Is.HANG,
        "torch ProcessGroupNCCL.cpp, ProcessGroupGloo.cpp; gloo transport/tcp",
        r"Watchdog caught collective operation timeout|[Ww]atchdog thread terminated|HeartbeatMonitor",
        r"Some NCCL operations have failed or timed out|we are taking the entire process down",
        r"Timed out waiting \d+ms for (?:recv|send)|Socket Timeout",
        r"[Rr]anks? .*failed to pass monitoredBarrier|timed out in monitoredBarrier",
    ),
    _secondary(
        Is.PEER_DIED,
        "gloo transport/tcp; torch ProcessGroupGloo.cpp",
        r"Connection (?:closed|reset|refused)|closed by peer|reset by peer|Broken pipe",
        r"Socket (?:closed|unexpectedly closed)|remote worker (?:hanging|crashing)",
        r"Gloo connectFullMesh failed|caused pair closure",
    ),
    _secondary(Is.PEER_DIED, "this package", r"PeerError:", r"^it lived when rank \d+ ended$"),
    _secondary(
        Is.PEER_DIED,
        "torch distributed/elastic/multiprocessing/api.py: an agent ends the others",
        r"^process ended by SIGTERM|^process ended with exit code 143$|SignalException: |closing signal SIGTERM",
    ),
    # --- the network itself -------------------------------------------------------------------------------------------
    _maybe(
        Is.NETWORK,
        "NCCL src/transport/net_ib.cc; errno(3); resolver; Linux drivers/net",
        r"ncclSystemError|no socket interface found|NET/IB ?:? .*(?:completion|error|failed)|Got async event",
        r"No route to host|Network is (?:unreachable|down)",
        r"Name or service not known|Temporary failure in name resolution",
        r"Link is Down|mlx5_core .*(?:error|health|Link down)",
    ),
    # --- the end of a process, of which nothing else tells ------------------------------------------------------------
    _maybe(Is.UNKNOWN, "NCCL nccl.h", r"ncclUnhandledCudaError|ncclInternalError"),
    _root(
        Is.UNKNOWN,
        "signal(7); a shell says 128 + number",
        r"^process ended by SIG(?:SEGV|ABRT|ILL|FPE|KILL|SYS)",
        r"^process ended with exit code (?:132|134|136|137|139)$",
    ),
    _root(
        Is.UNKNOWN,
        "torch utils/data/dataloader.py",
        r"DataLoader worker .* (?:is killed by signal|exited unexpectedly)",
    ),
    _maybe(
        Is.USER_ERROR, "the program ends itself", r"^process ended with exit code \d+$", r"^SystemExit: (?!0$|None$)"
    ),
    # --- errors of Python, by their names -----------------------------------------------------------------------------
    _root(
        Is.USER_ERROR,
        "Python; torch _utils.py",
        r"Caught \w+ in DataLoader worker process",
        r"^(?:\w+\.)*(?:Type|Index|Key|Name|Attribute|Value|Import|ModuleNotFound|Syntax|Indentation)Error\b",
        r"^(?:\w+\.)*(?:FileNotFound|Permission|IsADirectory|NotADirectory|Unpickling|JSONDecode|UnicodeDecode)Error\b",
        r"^(?:\w+\.)*(?:Assertion|ZeroDivision|NotImplemented|Recursion|UnboundLocal|Lookup|Overflow)Error\b",
        r"^(?:\w+\.)*(?:Usage|Conflict|NotFound)Error\b",
    ),
    _root(
        Is.USER_ERROR,
        "torch aten, autograd",
        r"mat1 and mat2 shapes|size mismatch|must match the size of tensor|to be on the same device",
        r"one of the variables needed for gradient|element 0 of tensors does not require grad",
        r"backward through the graph a second time",
    ),
)
