"""What the user wishes: frozen and validated here, never written to afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from kdray.errors import ConfigError

Mode = Literal["tree", "chain", "plain"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
KVDType = Literal["auto", "bf16", "fp8"]
DraftWeightType = Literal["auto", "int4"]
LoadFormat = Literal["auto", "dummy"]

MAX_BUDGET = 1024
MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """When a gang counts as hung, and how often it is started again.

    step_multiple     a step is late when it takes so many times what slow steps before it took
    step_floor_s      but never sooner than this
    start_steps       steps behind a start to which start_floor_s applies instead
    start_floor_s     room for first launches, kernels compiled on demand, cold files
    pulse_every_s     how often rank 0 is asked whether it gets on
    pulse_timeout_s   a rank 0 that does not answer for so long is hung, whatever it does
    max_restarts      within window_s; one more fault ends the engine
    window_s          how long a restart counts
    backoff_s         wait before the second restart in a window; it doubles with every further one
    end_timeout_s     longest wait for a killed gang's processes and GPU memory to be gone
    """

    step_multiple: float = 20.0
    step_floor_s: float = 20.0
    start_steps: int = 20
    start_floor_s: float = 120.0
    pulse_every_s: float = 1.0
    pulse_timeout_s: float = 30.0
    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    end_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _between("start_steps", self.start_steps, 0, 1 << 40)
        _between("max_restarts", self.max_restarts, 0, 1 << 40)
        if not self.step_multiple >= 1:
            raise ConfigError(f"step_multiple must be at least 1, got {self.step_multiple}")
        _above_zero(
            self,
            "step_floor_s",
            "start_floor_s",
            "pulse_every_s",
            "pulse_timeout_s",
            "window_s",
            "backoff_s",
            "end_timeout_s",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticAcceptance:
    """How drafts are accepted where that is assumed, not found out: for benchmarks alone.

    hits       chance of the drafter's first token at each depth where all tokens before were its
               first; the last one holds for all depths behind it
    siblings   chance of its second, third, .. where the first is wrong
    off_path   chance of its first behind a sibling; that of the siblings there shrinks alike

    siblings and off_path by themselves are what others measured with a 4B model's DFlash drafter.
    """

    hits: tuple[float, ...]
    siblings: tuple[float, ...] = (0.37, 0.12, 0.09)
    off_path: float = 0.22

    def __post_init__(self) -> None:
        if not self.hits:
            raise ConfigError("synthetic_acceptance wants at least one hit rate")
        for rate in (*self.hits, *self.siblings, self.off_path):
            if not 0 <= rate <= 1:
                raise ConfigError(f"synthetic_acceptance: a rate must be from 0 to 1, got {rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: which model, on how many ranks, speculating how, within which limits.

    model               "demo" or the path of a Hugging Face-format folder
    drafter             "auto" (the demo's own for the demo, else none), "none", or a DFlash folder
    tp                  tensor-parallel ranks, one process (and one GPU) each
    dtype               "auto": float32 on a CPU, bfloat16 on a GPU
    kv_dtype            of the target's KV. "auto": as dtype; "fp8", for models in bfloat16: latents
                        in 8 bits with a scale a row, 44 % fewer bytes for Kimi
    draft_weights       of the drafter's MLPs. "auto": as dtype; "int4": rounded at load to 4 bits
                        with a scale for every 32 inputs; a GPU in bfloat16 keeps them so, in 28 %
                        of the bytes. It changes what is drafted, never what is said
    draft_tp            ranks that share the drafter: tp, or 1, which has rank 0 draft alone; None:
                        tp where the drafter's sizes allow it. It never changes what is said
    batch_invariant     of models in bfloat16 on GPUs: a token's logits have the same bits whatever
                        shares its step, so trees, chains and plain decoding say the same tokens,
                        near ties too; a step takes longer. Without it they do where logits are
                        further apart than bfloat16 rounds
    load_format         "auto": weights from the folders' files; "dummy": drawn by their names, for
                        folders of a config.json alone: to see speed, its text means nothing
    mode, budget        tree of `budget` draft nodes, chain of at most `budget`, or plain decoding
    candidates          K, the drafter's best tokens kept at every depth
    max_requests        requests that run at the same time; further ones wait
    max_model_len       longest prompt + output in tokens; None: what the model allows
    prefill_chunk       prompt tokens run in one step, over all requests
    page_size           token slots in a KV page
    num_pages           KV pages; None: enough for max_requests of max_model_len, capped by
                        kv_memory_bytes
    kv_memory_bytes     KV memory a rank may take, in bytes, where num_pages is None. None: on GPUs
                        all the room that the memory plan leaves, of the rank that has the least; on
                        a CPU 1 GiB
    threads             torch threads a rank on a CPU; None: up to four, one core left free
    graphs              on GPUs: decode in CUDA graphs that run ahead of the host; False: step by
                        step from the host, which is slower and gives the same tokens
    norm_eps_qkv        epsilon of the q_a and kv_a norms; None: 1e-6, as published weights expect
    start_timeout_s     longest wait for placement, and again for the ranks to come up
    step_timeout_s      longest wait of one rank for another inside a step; who is hung is found
                        sooner (faults)
    nsight              start the ranks under Nsight Systems (nsys), which then records their GPUs
    profile_folder      where profiles are written, on the ranks' host; None: a folder of this
                        user's own under the system's temporary one
    faults              when the ranks count as hung, and how often they are started again
    synthetic_acceptance   for benchmarks: drafts are accepted at these rates, whatever the target
                        says, so the text is not the model's; None: never
    """

    model: str = "demo"
    drafter: str = "auto"
    tp: int = 1
    device: Device = "auto"
    dtype: DType = "auto"
    kv_dtype: KVDType = "auto"
    draft_weights: DraftWeightType = "auto"
    draft_tp: int | None = None
    batch_invariant: bool = False
    load_format: LoadFormat = "auto"
    mode: Mode = "tree"
    budget: int = 16
    candidates: int = 16
    max_requests: int = 16
    max_model_len: int | None = None
    prefill_chunk: int = 512
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_bytes: int | None = None
    threads: int | None = None
    graphs: bool = True
    norm_eps_qkv: float | None = None
    start_timeout_s: float = 120.0
    step_timeout_s: float = 120.0
    nsight: bool = False
    profile_folder: str | None = None
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    synthetic_acceptance: SyntheticAcceptance | None = None

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, get_args(Mode))
        _one_of("device", self.device, get_args(Device))
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("kv_dtype", self.kv_dtype, get_args(KVDType))
        _one_of("draft_weights", self.draft_weights, get_args(DraftWeightType))
        _one_of("load_format", self.load_format, get_args(LoadFormat))
        rates = self.synthetic_acceptance
        if rates is not None and not isinstance(rates, SyntheticAcceptance):
            raise ConfigError(f"synthetic_acceptance must be a SyntheticAcceptance, got {rates!r}")
        _between("tp", self.tp, 1, 1024)
        if self.draft_tp not in (None, 1, self.tp):
            raise ConfigError(f"draft_tp must be 1 or tp, which is {self.tp}, got {self.draft_tp}")
        _between("budget", self.budget, 0, MAX_BUDGET)
        _between("candidates", self.candidates, 1, MAX_CANDIDATES)
        _between("max_requests", self.max_requests, 1, 4096)
        _between("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        _between("page_size", self.page_size, 1, 4096)
        for name in ("max_model_len", "num_pages", "kv_memory_bytes", "threads"):
            value = getattr(self, name)
            if value is not None:
                _between(name, value, 1, 1 << 40)
        _above_zero(self, "start_timeout_s", "step_timeout_s")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _above_zero(wishes: object, *names: str) -> None:
    for name in names:
        if not getattr(wishes, name) > 0:
            raise ConfigError(f"{name} must be greater than 0, got {getattr(wishes, name)}")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
