"""The errors that are recognised, each with its meaning and remedy. Pure.

The first pattern that occurs in a text decides, so specific patterns come before general ones: the catalogue begins
with errors that can only be first causes and ends with those of any connection. Collected from issue trackers and
from failures that were made with torch 2.13 and gloo; see `docs/diagnosis.md`.
"""

from __future__ import annotations

import re

from .symptoms import Nature, Recognised, Symptom, recognise

_REST_OF_LINE, _NEAR = r"[^\n]*", r"[^\n]{0,400}"
"""How far apart in a line what belongs to a symptom may be. Without the bound, a line that repeats the beginning of a
symptom thousands of times takes seconds."""


def known_error(error: str, output: str = "") -> Recognised | None:
    """The known error in a worker's error message, or None.

    Where several causes lead to the same message, what the worker wrote before may tell which it was: `output`.
    """
    found = recognise(error, CATALOGUE)
    if found is None or found.symptom.name not in _VAGUE or not output:
        return found
    return recognise(output, _SPECIFIC) or found


def _symptom(
    name: str, nature: Nature, pattern: str, meaning: str, remedy: str = "", *, fact: str = ""
) -> Symptom:
    return Symptom(name, nature, re.compile(pattern.replace(_REST_OF_LINE, _NEAR)), meaning, remedy, fact)


_OWN, _ENV, _LATE, _PEER = Nature.OWN, Nature.ENVIRONMENT, Nature.NO_ANSWER, Nature.PEER

_STOPS = (
    _symptom(
        "stopped",
        Nature.STOPPED,
        r"KeyboardInterrupt|SIGTERMException|SignalException|got signal: (?:2|15)\b"
        r"|killed by signal: Terminated",
        "the worker was told to stop",
    ),
)

_GPU = (
    _symptom(
        "cuda-out-of-memory",
        _OWN,
        r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
        r"|HIP out of memory",
        "the GPU has too little free memory",
        "reduce the batch size, or see with nvidia-smi whether other processes use this GPU",
    ),
    _symptom(
        "cuda-duplicate-gpu",
        _OWN,
        r"Duplicate GPU detected",
        "two workers use the same GPU",
        "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first, and start at most one worker per GPU "
        "(--nproc-per-node)",
    ),
    _symptom(
        "cuda-invalid-device",
        _OWN,
        r"invalid device ordinal|Invalid device id|device=\d+, num_gpus=\d+",
        "the worker selected a GPU that it does not see",
        "set --nproc-per-node to at most the number of visible GPUs; with Slurm, request GPUs per node rather than "
        "per task (--gpus-per-task and CUDA_VISIBLE_DEVICES hide them)",
    ),
    _symptom(
        "cuda-ecc",
        _ENV,
        r"uncorrectable ECC error|(?:GPU|device) (?:has )?fallen off the bus|\bXid\b.*\b(?:48|63|64|74|79|94|95)\b"
        r"|cudaErrorECCUncorrectable|CUDA error: unknown error",
        "the GPU is defective",
        "take this machine out of the run (elastic-agent drain), look for Xid in its kernel log (dmesg), and "
        "reset or replace the GPU",
    ),
    _symptom(
        "cuda-assert",
        _OWN,
        r"device-side assert triggered",
        "an index or label was out of range in a CUDA kernel",
        "check labels and embedding indices; CUDA_LAUNCH_BLOCKING=1 shows the line that failed",
    ),
    _symptom(
        "cuda-illegal-access",
        _OWN,
        r"illegal memory access|unspecified launch failure|misaligned address|CUDNN_STATUS_EXECUTION_FAILED"
        r"|CUBLAS_STATUS_EXECUTION_FAILED",
        "a CUDA kernel failed",
        "CUDA_LAUNCH_BLOCKING=1 shows the line; if it is always the same machine, test its GPU (dmesg, Xid)",
    ),
    _symptom(
        "cuda-no-kernel",
        _ENV,
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "this build of PyTorch does not support this GPU",
        "install a PyTorch built for the GPU's architecture (torch.cuda.get_arch_list() lists those of this build)",
    ),
    _symptom(
        "cuda-driver-too-old",
        _ENV,
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old"
        r"|forward compatibility was attempted",
        "the NVIDIA driver is too old for this PyTorch",
        "update the driver on this machine, or install a PyTorch for an older CUDA",
    ),
    _symptom(
        "cuda-driver-mismatch",
        _ENV,
        r"Driver/library version mismatch|system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        "the NVIDIA driver or fabric manager does not run properly",
        "reboot after a driver update; on NVSwitch machines, check that nvidia-fabricmanager runs",
    ),
    _symptom(
        "cuda-not-available",
        _ENV,
        r"Torch not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device"
        r"|no GPUs found|requires? (?:a )?GPUs? |ProcessGroupNCCL is only supported with GPUs"
        r"|Distributed package doesn't have NCCL",
        "no GPU can be used here: none is visible, or this PyTorch was built without CUDA",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES, install a CUDA build of PyTorch, or use the gloo backend",
    ),
)

_MEMORY_AND_DISK = (
    _symptom(
        "shm-full",
        _ENV,
        r"(?:/dev/shm|shared memory|torch_shm|/torch_\d+)[^\n]*(?:No space left|\(28\))"
        r"|posix_fallocate|unable to allocate shared memory|insufficient shared memory|out of shared memory"
        r"|Bus error",
        "/dev/shm is too small",
        "enlarge it (docker --shm-size=8g; in Kubernetes an emptyDir with medium: Memory at /dev/shm), or use "
        "fewer DataLoader workers",
        fact="shm",
    ),
    _symptom(
        "too-many-files",
        _ENV,
        r"Too many open files|EMFILE|(?:shared memory|file descriptor)[^\n]*\(24\)|received 0 items of ancdata",
        "the limit of open files is reached",
        "raise it (ulimit -n 65536; LimitNOFILE= in systemd), or call "
        'torch.multiprocessing.set_sharing_strategy("file_system")',
        fact="open_files",
    ),
    _symptom(
        "disk-full",
        _ENV,
        r"No space left on device|ENOSPC|Disk quota exceeded|EDQUOT|File too large"
        r"|PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos",
        "a disk or quota is full",
        "free space on that disk, or write checkpoints and logs elsewhere",
        fact="disk_full",
    ),
    _symptom(
        "read-only",
        _ENV,
        r"Read-only file system|EROFS",
        "the folder is on a read-only file system",
        "mount it writable on this machine, or write elsewhere",
    ),
    _symptom(
        "stale-file",
        _ENV,
        r"Stale file handle|ESTALE|Transport endpoint is not connected",
        "the shared file system lost the file or its server",
        "remount the file system on this machine",
    ),
    _symptom(
        "disk-error",
        _ENV,
        r"\[Errno 5\] Input/output error",
        "the disk or file server reported an error",
        "look for disk errors in the kernel log of this machine (dmesg)",
    ),
    _symptom(
        "memlock",
        _ENV,
        r"ibv_reg_mr[^\n]*(?:Cannot allocate memory|failed)|ibv_create_(?:cq|qp)[^\n]*failed",
        "InfiniBand may lock too little memory",
        "ulimit -l unlimited for the agent: LimitMEMLOCK=infinity in systemd, "
        "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        fact="memlock_limit",
    ),
    _symptom(
        "memory",
        _ENV,
        r"DefaultCPUAllocator: (?:can't|not enough) |Cannot allocate memory|\bMemoryError\b|std::bad_alloc",
        "the machine, or the memory limit of the job, has too little free memory",
        "use fewer DataLoader workers or smaller batches, or raise the job's memory limit",
        fact="memory_available",
    ),
    _symptom(
        "process-limit",
        _ENV,
        r"can't start new thread|fork: Resource temporarily unavailable|pthread_create failed"
        r"|\[Errno 11\] Resource temporarily unavailable",
        "the limit of processes and threads is reached",
        "raise it (ulimit -u; TasksMax= in systemd; pids limit of the container), or set OMP_NUM_THREADS lower",
        fact="process_limit",
    ),
    _symptom(
        "loader-killed",
        _ENV,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: (?:Killed|Segmentation fault|Aborted)"
        r"|exited unexpectedly)",
        "a process of the DataLoader was killed",
        "if the memory was used up, use fewer DataLoader workers; num_workers=0 shows errors of the dataset itself",
        fact="oom_kills",
    ),
)

_SCRIPT = (
    _symptom(
        "collective-mismatch",
        _OWN,
        r"Detected mismatch between collectives on ranks",
        "the workers called different collectives, or the same with different shapes",
        "make all ranks run the same sequence of collectives: same model, same number of batches, no collective "
        "inside `if rank == 0`",
    ),
    _symptom(
        "collective-shapes",
        _OWN,
        r"op\.preamble\.length <= op\.nbytes|ncclInvalidArgument|tensor[s]? must (?:be|have) the same (?:size|shape)",
        "the workers passed tensors of different sizes to a collective",
        "make all ranks run the same sequence of collectives with the same shapes",
    ),
    _symptom(
        "ddp-unused",
        _OWN,
        r"Expected to have finished reduction in the prior iteration",
        "DDP waits for gradients of parameters that the loss does not depend on",
        "pass find_unused_parameters=True to DistributedDataParallel, or use all parameters in forward()",
    ),
    _symptom(
        "cuda-fork",
        _OWN,
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was initialised before a process was forked",
        "use the start method spawn for the DataLoader, or move CUDA calls behind the fork",
    ),
    _symptom(
        "misplaced-option",
        _OWN,
        r"(?:unrecognized arguments|[Nn]o such option)[^\n]*?--(?:nnodes|nproc[-_]per[-_]node|node[-_]id|rdzv[-_]\w+"
        r"|standalone|max[-_]restarts|lease[-_]ttl|hang[-_]timeout|status[-_]port|redirects|tee|log[-_]dir|preload)\b",
        "the script received an option of elastic-agent",
        "put the options of elastic-agent before the script: elastic-agent OPTIONS SCRIPT ARGUMENTS",
    ),
    _symptom(
        "missing-module",
        _OWN,
        r"(?:ModuleNotFoundError|ImportError): ",
        "a module is missing or cannot be loaded",
        "install the same packages on every machine, and check that the agent uses the intended Python",
    ),
    _symptom(
        "missing-library",
        _ENV,
        r"cannot open shared object file|undefined symbol|version `GLIBC",
        "a shared library is missing or has another version",
        "check LD_LIBRARY_PATH, and that all machines have the same packages",
    ),
    _symptom(
        "process-group-missing",
        _OWN,
        r"Default process group has not been initialized",
        "a collective was called before init_process_group",
        "call torch.distributed.init_process_group() first",
    ),
    _symptom(
        "process-group-twice",
        _OWN,
        r"trying to initialize the default process group twice",
        "the script, or a framework that it uses, has already called init_process_group",
        "call it once, or only if not torch.distributed.is_initialized()",
    ),
    _symptom(
        "permission",
        _ENV,
        r"PermissionError: |Permission denied|Operation not permitted",
        "access was denied",
        "run all agents as the same user, with the same access to shared folders",
    ),
    _symptom(
        "missing-file",
        _OWN,
        r"FileNotFoundError: |No such file or directory",
        "a file is missing on this machine",
        "check that data and checkpoints are on storage that every machine mounts at the same path",
    ),
    _symptom(
        "checkpoint-corrupt",
        _OWN,
        r"PytorchStreamReader failed|invalid header or archive is corrupted|failed finding central directory"
        r"|MetadataIncompleteBuffer|HeaderTooLarge",
        "a checkpoint is incomplete",
        "write to a temporary file and rename it when it is complete; delete the damaged one",
    ),
)

_SETUP = (
    _symptom(
        "gloo-interface-list",
        _ENV,
        r"Unable to find address for: ?(?:\^|=|[\w.-]+,)",
        "GLOO_SOCKET_IFNAME has NCCL's syntax, but gloo expects the name of one interface",
        "set GLOO_SOCKET_IFNAME to one name as listed by `ip -br address`, such as eth0, or unset it",
    ),
    _symptom(
        "gloo-interface",
        _ENV,
        r"Unable to find (?:address|interface) for|ifa != nullptr|Unable to find interface",
        "GLOO_SOCKET_IFNAME names no interface of this machine that has an address",
        "set it on each machine to a name from `ip -br address`, or unset it",
    ),
    _symptom(
        "nccl-interface",
        _ENV,
        r"no socket interface found|connecting to address with family \d+ is neither",
        "NCCL_SOCKET_IFNAME names no interface of this machine",
        "set it on each machine to a name from `ip -br address`, or unset it",
    ),
    _symptom(
        "nccl-version",
        _ENV,
        r"[Mm]ismatched NCCL version|NCCL version mismatch",
        "the machines have different versions of NCCL",
        "install the same PyTorch on all machines, and check LD_LIBRARY_PATH for another libnccl",
    ),
    _symptom(
        "port-in-use",
        _ENV,
        r"EADDRINUSE|[Aa]ddress already in use",
        "another process listens on the port",
        "`ss -ltnp` shows which one; use the MASTER_PORT that the agent sets, or another port",
    ),
    _symptom(
        "name-unknown",
        _ENV,
        r"gai error|Name or service not known|Temporary failure in name resolution|getaddrinfo"
        r"|nodename nor servname",
        "a host name cannot be resolved on this machine",
        "add the name to DNS or /etc/hosts (also the machine's own name), or use an IP address",
    ),
    _symptom(
        "loopback-address",
        _ENV,
        r"connectFullMesh failed[^\n]*remote=\[(?:127\.|::1\])",
        "another machine announced a loopback address to gloo",
        "its host name resolves to 127.0.x.1: correct its /etc/hosts, or set GLOO_SOCKET_IFNAME there",
    ),
    _symptom(
        "master-port",
        _ENV,
        r"MASTER_(?:ADDR|PORT) expected, but not set|environment variable (?:RANK|WORLD_SIZE|MASTER_\w+) expected",
        "the script, or its environment, removed variables that the agent sets",
        "do not unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before init_process_group",
    ),
)

_WAITS = (
    _symptom(
        "connect-refused",
        _LATE,
        r"connectFullMesh failed[^\n]*|(?:socketPollConnect|Call to connect)[^\n]*(?:refused|No route|unreachable)"
        r"|No route to host|Network is unreachable",
        "the workers could not connect to each other",
        "if no worker failed earlier: let the machines connect to each other on all ports (firewall), and set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of that network",
    ),
    _symptom(
        "store-timeout",
        _LATE,
        r"client socket has (?:timed out|failed to connect)|failed to connect/validate to host"
        r"|RendezvousConnectionError|Connection to the C10d store has failed",
        "the store at MASTER_ADDR and MASTER_PORT did not answer",
        "do not set MASTER_ADDR and MASTER_PORT in the script; otherwise open this port between the machines",
    ),
    _symptom(
        "wait-timeout",
        _LATE,
        r"[Ww]ait timeout after|waiting for clients\. \d+/\d+ clients joined|DistStoreError|Socket Timeout",
        "other workers did not reach the same point in time",
        "find the worker that is late: it still loads or saves data, hangs, or has ended",
    ),
    _symptom(
        "barrier-timeout",
        _LATE,
        r"failed to pass monitoredBarrier|timed out in monitoredBarrier",
        "a worker did not reach the barrier in time",
        "look at what this worker did: saving, evaluating, loading data, or a different branch of the script",
    ),
    _symptom(
        "gloo-timeout",
        _LATE,
        r"Timed out waiting \d+ ?ms for (?:recv|send)|Application timeout caused pair closure"
        r"|(?:Read|Write|Connect) timeout \[|Operation timed out!",
        "another worker did not take part in a collective in time",
        "look at what the other workers did: saving, evaluating, loading data, or one batch less; if that takes "
        "long on purpose, pass timeout= to init_process_group",
    ),
    _symptom(
        "nccl-timeout",
        _LATE,
        r"Watchdog caught collective operation timeout|watchdog got stuck|Some NCCL operations have failed or timed out"
        r"|NCCL timeout|Timeout\(ms\)=",
        "another worker did not take part in a collective in time",
        "look at what the other workers did: saving, evaluating, loading data, or one batch less; if that takes "
        "long on purpose, pass timeout= to init_process_group",
    ),
)

_PEERS = (
    _symptom(
        "gloo-peer",
        _PEER,
        r"(?:gloo|pair\.cc)[^\n]*(?:Connection (?:closed|reset) by peer|Broken pipe)|Connection closed by peer \["
        r"|(?:Read|Write) error \[[^\n]*(?:reset by peer|Broken pipe)|caused by a remote worker (?:crashing|hanging)",
        "another worker closed its connection: it ended before",
    ),
    _symptom(
        "barrier-peer",
        _PEER,
        r"received errors while waiting for send/recv from rank",
        "another worker found that a rank was missing in a barrier",
    ),
    _symptom(
        "nccl-peer",
        _PEER,
        r"ncclRemoteError|remote process exited|Connection closed by remote peer|Socket recv failed while polling"
        r"|Got completion from peer|Call to (?:recv|send|recvmsg)[^\n]*failed : (?:Connection reset|Broken pipe)"
        r"|NCCL communicator was aborted",
        "another worker closed its connection: it ended before, or the network failed",
    ),
    _symptom(
        "store-gone",
        _PEER,
        r"Connection was likely closed|DistNetworkError|(?:recvValue|sendBytes|sendBytesImpl|recvBytes)\b[^\n]*fail"
        r"|Failed to recv, got 0 bytes|TCPStore\.cpp[^\n]*(?:Broken pipe|Connection reset)"
        r"|Socket Closed|DistBackendError: .*(?:Broken pipe|Connection reset)",
        "the bootstrap store of the generation is gone: its agent stopped or failed",
    ),
)

_GENERAL = (
    _symptom(
        "nccl-system",
        _ENV,
        r"ncclSystemError|unhandled system error",
        "NCCL could not use the network, shared memory or a driver of this machine",
        "set NCCL_DEBUG=WARN: the line before names the call that failed",
    ),
    _symptom(
        "nccl-usage",
        _OWN,
        r"ncclInvalidUsage|invalid usage, NCCL",
        "NCCL was used in a way that it does not support, often several workers on one GPU",
        "set NCCL_DEBUG=WARN: the line before says what is wrong",
    ),
    _symptom(
        "nccl-cuda",
        _ENV,
        r"ncclUnhandledCudaError|unhandled cuda error",
        "a CUDA call of NCCL failed",
        "set NCCL_DEBUG=WARN: the line before names the call; compare driver and NCCL versions of the machines",
    ),
    _symptom(
        "nccl-internal",
        _PEER,
        r"ncclInternalError",
        "NCCL failed internally, usually because another worker ended",
        "if no other worker failed before, set NCCL_DEBUG=WARN and run again",
    ),
    _symptom(
        "http",
        _ENV,
        r"HTTPError|ConnectTimeout|ReadTimeout|Max retries exceeded|SSLError|SSLCertVerificationError"
        r"|CERTIFICATE_VERIFY_FAILED|LocalEntryNotFoundError|OfflineModeIsEnabled",
        "a download failed",
        "download data and models once to storage that all machines read, or check the proxy of this machine",
    ),
    _symptom(
        "connection",
        _ENV,
        r"ConnectionRefusedError|ConnectionResetError|BrokenPipeError|ConnectionError|TimeoutError",
        "a connection of the script failed",
        "check that the other program or server runs and can be reached from this machine",
    ),
)

CATALOGUE = (*_STOPS, *_GPU, *_MEMORY_AND_DISK, *_SCRIPT, *_SETUP, *_WAITS, *_PEERS, *_GENERAL)
"""In the order in which they are tried."""

BY_NAME = {symptom.name: symptom for symptom in CATALOGUE}

_VAGUE = frozenset(
    {
        "connect-refused",
        "store-timeout",
        "loader-killed",
        "nccl-system",
        "nccl-usage",
        "nccl-cuda",
        "nccl-internal",
    }
)
"""Errors whose message does not tell the cause."""

_SPECIFIC = tuple(symptom for symptom in (*_GPU, *_MEMORY_AND_DISK, *_SETUP) if symptom.name not in _VAGUE)
"""Errors of which libraries write warnings before."""
