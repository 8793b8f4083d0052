"""Sharded tensors: rules that need no communication on batch and heads, FSDP2, checkpointing, Ulysses.

Two processes with gloo; with `--device cuda` two GPUs with NCCL. The functions check_* assert on each rank, and
`ranks.run` raises what they found. Larger meshes are checked for placements only, on torch's fake process group."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import RECIPES, Shape, make_case
from contract import assert_close, assert_same_bits
from ranks import COUNT, Ranks
from test_ops import step
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import attn_qat

OPS = torch.ops.attn_qat
EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPE = Shape(4, 8, 4, 40, 70, 64)
BATCH, HEADS = 0, 1


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    device_type = torch.device(request.config.getoption("--device")).type
    if device_type == "cuda" and torch.cuda.device_count() < COUNT:
        pytest.skip(f"needs {COUNT} GPUs")
    pool = Ranks(device_type, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


def placement(dim):
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if dim is None else Shard(dim)


def shard(x, mesh, dim):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, mesh, [placement(dim)])


def without_communication(function):
    """function(), which may not call a collective."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        result = function()
    assert not mode.get_comm_counts(), mode.get_comm_counts()
    return result


def assert_sharded(got, want, dim) -> None:
    """got is a DTensor sharded on dim (None: replicated) with the bits of want."""
    assert got.placements == (placement(dim),), got.placements
    assert_same_bits(got.full_tensor(), want)


def check_that_fails(mesh, rank):
    assert mesh.get_rank() != rank, "found wrong"


@pytest.mark.parametrize("rank", range(COUNT))
def test_what_one_rank_finds_wrong_is_raised_here(rank, ranks):
    with pytest.raises(AssertionError, match=rf"rank {rank}: (?s:.*)found wrong"):
        ranks.run(check_that_fails, rank)


# --- attention ----------------------------------------------------------------------------------------------


def check_attention(mesh, shape, recipe, dim):
    case = make_case(shape, mesh.device_type)
    function = partial(attn_qat.attention, is_causal=shape.causal, recipe=recipe)
    sharded = case.map(lambda x: shard(x, mesh, dim))
    got = without_communication(lambda: step(function, sharded))
    for x, want in zip(got, step(function, case), strict=True):
        assert_sharded(x, want, dim)


@pytest.mark.parametrize("dim", [None, BATCH, HEADS], ids=["replicated", "batch", "heads"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_batch_and_heads_need_no_communication(causal, recipe, dim, ranks):
    """Forward and backward where the tensors lie: the bits of one rank alone, sharded as the inputs."""
    ranks.run(check_attention, Shape(4, 8, 4, 40, 70, 64, causal), recipe, dim)


def test_batches_of_unequal_size(ranks):
    ranks.run(check_attention, Shape(3, 4, 2, 40, 40, 64), "fp4", BATCH)


def check_correct(mesh, shape, dim, recipe="fp4"):
    case = make_case(shape, mesh.device_type)
    function = partial(attn_qat.attention, recipe=recipe)
    got = step(function, case.map(lambda x: shard(x, mesh, dim)))
    for x, want in zip(got, step(function, case), strict=True):
        assert_same_bits(x.full_tensor(), want)


@pytest.mark.parametrize("heads_q, heads_kv", [(6, 3), (6, 1), (3, 3)])
def test_heads_that_do_not_divide_are_gathered(heads_q, heads_kv, ranks):
    """3 heads as 2 and 1, as torch shards them, would pair query heads with kv heads of other groups."""
    ranks.run(check_correct, Shape(1, heads_q, heads_kv, 40, 40, 64), HEADS)


@pytest.mark.parametrize("dim", [2, 3], ids=["sequence", "head dim"])
def test_other_dimensions_are_gathered(dim, ranks):
    ranks.run(check_correct, SHAPE, dim)


def check_mixed(mesh):
    """q on batch, k on heads, v replicated: redistributed, and right."""
    case = make_case(SHAPE, mesh.device_type)
    got = attn_qat.attention(
        shard(case.q, mesh, BATCH), shard(case.k, mesh, HEADS), shard(case.v, mesh, None)
    )
    assert_same_bits(got.full_tensor(), attn_qat.attention(case.q, case.k, case.v))


def test_mixed_placements(ranks):
    ranks.run(check_mixed)


def check_compiled(mesh, dim):
    case = make_case(SHAPE, mesh.device_type)
    sharded = case.map(lambda x: shard(x, mesh, dim))
    compiled = torch.compile(attn_qat.attention, fullgraph=True, backend="aot_eager")
    for x, want in zip(step(compiled, sharded), step(attn_qat.attention, case), strict=True):
        assert_sharded(x, want, dim)


@pytest.mark.parametrize("dim", [BATCH, HEADS], ids=["batch", "heads"])
def test_compiles_in_one_graph(dim, ranks):
    ranks.run(check_compiled, dim)


# --- every operator -----------------------------------------------------------------------------------------


def check_operators(mesh, recipe, dim):
    """Each attention operator: no communication, results sharded as the arguments, the bits of one rank."""
    case = make_case(SHAPE, mesh.device_type)
    local = lambda x: shard(x, mesh, dim) if isinstance(x, torch.Tensor) else x  # noqa: E731
    saved = case.forward(recipe)
    calls = [
        (OPS.forward, case.forward_args(recipe)),
        (OPS.preprocess, (saved[1], case.grad_out)),
        (OPS.backward, case.backward_args(recipe, saved)),
        (OPS.backward, case.backward_args(recipe, saved)[:-1]),  # without row_exponent
        (OPS.backward_dq, case.half_args(recipe, saved)),
        (OPS.backward_dkdv, case.half_args(recipe, saved)),
    ]
    if recipe != "cudnn":
        calls += [(op, case.forward_args(recipe)) for op in (OPS.infer, OPS.infer_with_lse)]
    for op, arguments in calls:
        sharded = [local(x) for x in arguments]
        got, want = without_communication(lambda: op(*sharded)), op(*arguments)  # noqa: B023
        results = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for x, y in results:
            assert_sharded(x, y, dim)


@pytest.mark.parametrize("dim", [BATCH, HEADS], ids=["batch", "heads"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_operators(recipe, dim, ranks):
    ranks.run(check_operators, recipe, dim)


def check_quantisation(mesh, axis, dim, out_dim, tiled):
    """Blocks stay whole if sharded on `dim`; out_dim: the same dimension of the packed form."""
    x = make_case(Shape(4, 2, 2, 256, 1, 64), mesh.device_type).q
    sharded, scale = shard(x, mesh, dim), torch.tensor([0.5], device=mesh.device_type)
    everywhere = shard(scale, mesh, None)
    fake = without_communication(lambda: OPS.fake_quantize(sharded, axis, everywhere))
    assert_sharded(fake, OPS.fake_quantize(x, axis, scale), dim)
    packed = without_communication(lambda: OPS.quantize(sharded, axis, everywhere, tiled))
    for got, want in zip(packed, OPS.quantize(x, axis, scale, tiled), strict=True):
        assert got.placements == (placement(out_dim),)
        assert_same_bits(got.to_local(), want.chunk(COUNT, out_dim)[mesh.get_rank()])
    back = without_communication(lambda: OPS.dequantize(*packed, x.dtype, axis, everywhere, tiled))
    assert_sharded(back, fake.full_tensor(), dim)


@pytest.mark.parametrize(
    "axis, dim, out_dim, tiled",
    [(-1, 0, 0, False), (-1, 1, 1, True), (-1, 2, 2, False), (-2, 0, 0, True), (-2, 3, 2, False)],
)
def test_quantisation(axis, dim, out_dim, tiled, ranks):
    ranks.run(check_quantisation, axis, dim, out_dim, tiled)


def check_blocks_across_ranks(mesh, axis, dim, tiled):
    x = make_case(Shape(1, 1, 1, 72, 1, 80), mesh.device_type).q  # 36 rows, 40 columns each: half blocks
    sharded = shard(x, mesh, dim)
    assert_same_bits(OPS.fake_quantize(sharded, axis).full_tensor(), OPS.fake_quantize(x, axis))
    for got, want in zip(
        OPS.quantize(sharded, axis, None, tiled), OPS.quantize(x, axis, None, tiled), strict=True
    ):
        assert torch.equal(got.full_tensor().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("axis, dim, tiled", [(-1, 3, False), (-2, 2, False), (-1, 2, True)])
def test_blocks_and_tiles_are_not_cut(axis, dim, tiled, ranks):
    ranks.run(check_blocks_across_ranks, axis, dim, tiled)


# --- FSDP2 and activation checkpointing ---------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, policy=None):
        super().__init__()
        self.policy = policy
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def attend(self, x):
        q, k, v = (y.unflatten(-1, (2, 64)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(
            attn_qat.attention(q, k, v, is_causal=True, recipe="fp4_qk").transpose(1, 2).flatten(2)
        )

    def forward(self, x):
        if self.policy is None:
            return x + self.attend(x)
        return x + checkpoint(self.attend, x, use_reentrant=False, **self.policy)


POLICIES = {
    "none": None,
    "full": {},
    "save attention": {"context_fn": partial(create_selective_checkpoint_contexts, [OPS.forward.default])},
}


def check_fsdp(mesh, policy):
    """Parameters sharded over the ranks, half the batch each: the mean of the two halves' gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    blocks = [Block(POLICIES[policy]) for _ in range(2)]
    model = nn.Sequential(*blocks).to(mesh.device_type)
    x = torch.randn(4, 50, 128, device=mesh.device_type)
    want = [torch.zeros_like(p) for p in model.parameters()]
    alone = nn.Sequential(Block(), Block()).to(mesh.device_type)
    alone.load_state_dict(model.state_dict())
    alone.bfloat16()
    for half in x.bfloat16().chunk(COUNT):
        grads = torch.autograd.grad(alone(half).float().square().mean(), list(alone.parameters()))
        want = [total + grad.float() / COUNT for total, grad in zip(want, grads)]

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model(x.chunk(COUNT)[mesh.get_rank()]).float().square().mean().backward()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        assert parameter.grad.placements == (placement(0),)
        assert_close(parameter.grad.full_tensor(), grad, 1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_fsdp2_with_activation_checkpointing(policy, ranks):
    ranks.run(check_fsdp, policy)


def check_checkpoint_of_dtensors(mesh, policy):
    case = make_case(SHAPE, mesh.device_type)
    sharded = case.map(lambda x: shard(x, mesh, HEADS))
    block = lambda q, k, v: attn_qat.attention(q * 2, k, v) * 3  # noqa: E731
    got = step(lambda *x: checkpoint(block, *x, use_reentrant=False, **POLICIES[policy]), sharded)
    for x, want in zip(got, step(block, case), strict=True):
        assert_sharded(x, want, HEADS)


@pytest.mark.parametrize("policy", ["full", "save attention"])
def test_checkpointing_sharded_tensors(policy, ranks):
    ranks.run(check_checkpoint_of_dtensors, policy)


# --- Ulysses ------------------------------------------------------------------------------------------------


def example(name):
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def check_ulysses(mesh, shape, recipe, compiled):
    attend = example("ulysses").ulysses_attention
    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    case = make_case(shape, mesh.device_type)
    piece = case.map(lambda x: x.chunk(COUNT, 2)[mesh.get_rank()].contiguous())
    options = {"is_causal": shape.causal, "recipe": recipe}
    want = step(partial(attn_qat.attention, **options), case)
    for got, x in zip(step(partial(function, group=mesh.get_group(), **options), piece), want, strict=True):
        assert_same_bits(got, x.chunk(COUNT, 2)[mesh.get_rank()])


@pytest.mark.parametrize(
    "recipe, causal, compiled", [("fp4", False, False), ("fp4_qk", True, False), ("fp4", False, True)]
)
def test_ulysses(recipe, causal, compiled, ranks):
    """Pieces of the sequence in, pieces out, gradients too: the bits of one rank alone."""
    ranks.run(check_ulysses, Shape(2, 4, 2, 64, 96 if not causal else 64, 64, causal), recipe, compiled)


@pytest.mark.parametrize(
    "name, says", [("dtensor", "4 of 8 heads each"), ("ulysses", "the bits of one rank alone")]
)
def test_the_examples_run(name, says):
    """On two CPU processes, as docs/distributed.md starts them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]  # torch 2.10's gloo says that it is connected
    assert last.startswith("2 ranks") and says in last


LEAVE = """
import sys, time
from pathlib import Path
import torch, ulysses

def threads():
    for task in Path("/proc/self/task").iterdir():
        try:
            yield (task / "comm").read_text()
        except OSError:
            pass  # it has just ended

def start(rank, folder):
    ulysses.start(rank, 2, f"{folder}/rendezvous")
    patience = time.monotonic() + 5  # the system forgets a thread a little after it is joined
    while "gloo" in (names := "".join(threads())) and time.monotonic() < patience:
        time.sleep(0.05)
    Path(folder, f"threads{rank}").write_text(names)

torch.multiprocessing.start_processes(start, args=sys.argv[1:], nprocs=2, start_method="fork")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the threads in /proc")
def test_no_thread_outlives_the_group(tmp_path):
    """One that still frees tensors while Python exits ends the process with std::terminate."""
    command = [sys.executable, "-c", LEAVE, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    for rank in range(COUNT):
        assert "gloo" not in (tmp_path / f"threads{rank}").read_text()


# --- larger meshes, on torch's fake process group
# ------------------------------------------------------------


@pytest.fixture
def fake_mesh():
    """Makes a mesh of ranks that do not exist: collectives do nothing, so only placements mean something."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(sizes):
        ranks = torch.Size(sizes).numel()
        dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
        return init_device_mesh("cpu", sizes)

    yield make
    dist.destroy_process_group()


STAY = [  # mesh, batch, query heads, kv heads, where q, k and v lie; nothing moves
    ((3, 2), 6, 4, 2, (BATCH, HEADS)),
    ((3, 2), 6, 4, 2, (None, HEADS)),
    ((2, 3), 6, 6, 3, (None, HEADS)),  # 3 heads do not divide by 2, but need not
    ((2, 2), 2, 12, 6, (None, HEADS)),  # nor 6 by 4
    ((2, 2), 2, 12, 6, (BATCH, HEADS)),
    ((2, 3), 1, 12, 6, (HEADS, HEADS)),
    ((2, 2, 2), 4, 8, 8, (BATCH, HEADS, HEADS)),
]


@pytest.mark.parametrize("sizes, batch, heads_q, heads_kv, dims", STAY, ids=str)
@pytest.mark.parametrize("loss", [torch.sum, lambda x: x.float().square().mean()], ids=["sum", "mean square"])
def test_larger_meshes(loss, sizes, batch, heads_q, heads_kv, dims, fake_mesh):
    """Forward and backward stay where q, k and v lie; after sum() the gradient is replicated and follows."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = fake_mesh(sizes), [placement(dim) for dim in dims]
    case = make_case(Shape(batch, heads_q, heads_kv, 32, 32, 64))
    inputs = [distribute_tensor(x, mesh, placements).requires_grad_() for x in (case.q, case.k, case.v)]
    out = without_communication(lambda: attn_qat.attention(*inputs))
    assert out.placements == tuple(placements)
    grads = without_communication(lambda: torch.autograd.grad(loss(out), inputs))
    for x, grad in zip(inputs, grads, strict=True):
        assert grad.placements == x.placements and grad.to_local().shape == x.to_local().shape


MOVE = [  # what may not happen: kv heads divided unevenly, on whichever dimensions of the mesh
    ((2, 2), (None, HEADS), (HEADS, None), 6),
    ((2, 2), (HEADS, HEADS), (HEADS, HEADS), 6),
    ((3, 2), (2, HEADS), (2, HEADS), 4),
    ((2, 3), (HEADS, None), (HEADS, HEADS), 4),
]


@pytest.mark.parametrize("sizes, of_q, of_kv, heads_kv", MOVE, ids=str)
def test_uneven_heads_are_never_paired(sizes, of_q, of_kv, heads_kv, fake_mesh):
    from torch.distributed.tensor import distribute_tensor

    mesh = fake_mesh(sizes)
    case = make_case(Shape(1, 12, heads_kv, 32, 32, 64))
    of = {"q": of_q, "k": of_kv, "v": of_kv}
    q, k, v = (distribute_tensor(getattr(case, n), mesh, [placement(d) for d in of[n]]) for n in "qkv")
    out = attn_qat.infer(q, k, v)
    ranks = [size for size, where in zip(sizes, out.placements) if where.is_shard(HEADS)]
    assert heads_kv % torch.Size(ranks).numel() == 0


# --- registration -------------------------------------------------------------------------------------------

IMPORTS = {
    "attn_qat first": "import attn_qat, torch.distributed.tensor",
    "DTensor first": "import torch.distributed.tensor, attn_qat",
    "asked for": "import attn_qat; attn_qat.distributed.register(); attn_qat.distributed.register()",
}
REGISTERED = """
import sys
hooks = [type(finder).__name__ for finder in sys.meta_path]
from torch.distributed.tensor import DTensor
known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
import torch
assert torch.ops.attn_qat.forward.default in known and torch.ops.attn_qat.infer.default in known
assert "_AfterImport" not in hooks, hooks
print("registered")
"""


@pytest.mark.parametrize("imports", IMPORTS.values(), ids=IMPORTS.keys())
def test_rules_are_there_whatever_is_imported_first(imports):
    code = imports + REGISTERED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "registered\n", done.stderr


def test_importing_attn_qat_does_not_import_dtensor():
    code = "import sys, attn_qat; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
