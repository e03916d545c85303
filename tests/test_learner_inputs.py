"""What the learner reads: every dtype, layout and source, by both ways in; indices out of range;
both JAX modes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import etrace_bridge as eb
from etrace_bridge.learning.inputs import FastReader, as_array

CLASSES, WORDS, B, T = 5, 7, 3, 4


class Tagger(nn.Module):
    """Token ids in, class scores out."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 4)
        self.rnn = nn.GRU(4, 6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def make_tagger() -> Tagger:
    torch.manual_seed(1)
    return Tagger()


IDS = torch.randint(WORDS, (T, B), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(CLASSES, (T, B), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tagger() -> eb.OnlineLearner:
    """A learner of learning rate 0, in 32-bit mode: it may be used by tests marked `x32` alone."""
    model = make_tagger()
    return eb.OnlineLearner(
        model, "d_rtrl", F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0)
    )


# -- the quick way and the checked way ------------------------------------------------------------


@pytest.mark.x32
def test_int64_ids_and_labels_are_right_from_the_second_step_on_in_32_bit_mode(tagger):
    expected = [
        F.cross_entropy(y, t).item() for y, t in zip(make_tagger()(IDS), LABELS, strict=True)
    ]
    tagger.reset()
    found = [tagger.step(x, t).loss for x, t in zip(IDS, LABELS, strict=True)]
    assert found == pytest.approx(expected, rel=1e-5) and len(set(expected)) == T


@pytest.mark.x32
def test_float64_targets_are_right_from_the_second_step_on_in_32_bit_mode():
    torch.manual_seed(2)
    model = nn.RNN(3, 2)
    xs, ys = torch.randn(T, B, 3), torch.randn(T, B, 2).double()
    expected = [F.mse_loss(y, t.float()).item() for y, t in zip(model(xs)[0], ys, strict=True)]
    learner = eb.OnlineLearner(
        model, "d_rtrl", F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0)
    )
    assert [learner.step(x, t).loss for x, t in zip(xs, ys, strict=True)] == pytest.approx(
        expected, rel=1e-5
    )


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, t + t], -1)[..., 0],
    "offset": lambda t: torch.cat([t + t, t])[t.shape[0] :],
    "expanded": lambda t: t[:, :1].expand(t.shape),
    "no elements": lambda t: t[:, :0],
    "no batch": lambda t: t[0, 0].clone(),
}


def draw(dtype: str, layout: str, seed: int) -> torch.Tensor:
    numbers = torch.randint(
        0 if dtype in ("bool", "uint8") else -50,
        50,
        (3, 4),
        generator=torch.Generator().manual_seed(seed),
    )
    return LAYOUTS[layout](numbers.to(getattr(torch, dtype)))


def from_torch(tensor: torch.Tensor, source: str):
    if source == "torch":
        return tensor
    if tensor.dtype == torch.bfloat16:
        array = tensor.float().numpy().astype(jnp.bfloat16)
    else:  # NumPy's arrays keep torch's strides
        array = tensor.numpy()
    return array if source == "numpy" else jnp.asarray(array)


def in_mode(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers in the dtype that JAX has for them, element by element."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))
    return np.array(tensor.flatten().tolist(), dtype).reshape(tensor.shape)


def assert_both_ways(dtype: str, layout: str, source: str) -> None:
    first = from_torch(draw(dtype, layout, 0), source)
    reader = FastReader(first, as_array(first), None, [], "The input", 2)
    for seed in (1, 2, 3):  # the buffers come round again
        tensor = draw(dtype, layout, seed)
        expected = in_mode(tensor)
        for found in (reader(from_torch(tensor, source)), as_array(from_torch(tensor, source))):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert np.array_equal(np.asarray(found), expected), (seed, found, expected)


@pytest.mark.x32
@pytest.mark.parametrize("source", ["torch", "numpy", "jax"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quick_and_checked_reading_agree_in_32_bit_mode(dtype, layout, source):
    assert_both_ways(dtype, layout, source)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quick_and_checked_reading_agree_in_64_bit_mode(dtype, layout):
    for source in ("torch", "numpy", "jax"):
        assert_both_ways(dtype, layout, source)


def test_the_fast_reader_declines_other_inputs():
    first = torch.zeros(2, 3)
    reader = FastReader(first, as_array(first), None, [], "The input", 2)
    assert reader(torch.ones(2, 3)) is not None
    parameter = nn.Parameter(torch.ones(2, 3))
    negative = torch.imag(torch.ones(2, 3, dtype=torch.complex64).conj())
    for other in (
        torch.ones(3, 3),
        torch.ones(2, 3).double(),
        np.ones((2, 3), np.float32),
        jnp.ones((2, 3), jnp.float32),
        [[1.0]],
        "text",
    ):
        assert reader(other) is None
    assert reader(parameter) is None and not reader(negative).any()


@pytest.mark.x32
@pytest.mark.parametrize(
    "source",
    [
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: jnp.asarray(t.numpy()),
        lambda t: t.numpy().astype(np.int16),
    ],
)
def test_ids_and_labels_of_every_source_give_one_loss(tagger, source):
    expected = [
        F.cross_entropy(y, t).item() for y, t in zip(make_tagger()(IDS), LABELS, strict=True)
    ]
    tagger.reset()
    # a list as input means several inputs
    ids = (lambda x: np.array(x)) if isinstance(source(IDS), list) else (lambda x: x)
    found = [tagger.step(ids(source(x)), source(t)).loss for x, t in zip(IDS, LABELS, strict=True)]
    assert found == pytest.approx(expected, rel=1e-5)


# -- indices out of range -------------------------------------------------------------------------

X = torch.arange(12.0).reshape(3, 4)
WEIGHT = torch.arange(10.0).reshape(5, 2)
INDEX_OPS = {
    "embedding": lambda i: F.embedding(i, WEIGHT),
    "embedding of a cast": lambda i: F.embedding(i.int().long().reshape(-1, 1), WEIGHT),
    "embedding of a column": lambda i: F.embedding(torch.stack([i, i], 0)[0], WEIGHT),
    "one_hot": lambda i: F.one_hot(i, 4),
    "cross_entropy": lambda i: F.cross_entropy(X, i),
    "cross_entropy, ignoring -1": lambda i: F.cross_entropy(X, i, ignore_index=-1),
    "cross_entropy, ignoring 1": lambda i: F.cross_entropy(
        X, i, ignore_index=1, label_smoothing=0.1, weight=torch.ones(4)
    ),
    "nll_loss": lambda i: F.nll_loss(X, i),
    "multi_margin_loss": lambda i: F.multi_margin_loss(X, i),
    "gather": lambda i: X.gather(1, i[:, None]),
    "take_along_dim": lambda i: torch.take_along_dim(X, i),
    "take": lambda i: X.take(i),
    "index": lambda i: X[:, i],
    "two indices": lambda i: X[i, i],
    "index_select": lambda i: X.index_select(1, i),
    "scatter": lambda i: X.scatter(1, i[:, None], 1.0),
    "scatter_add": lambda i: X.scatter_add(1, i[:, None], X),
    "index_add": lambda i: X.index_add(0, i, X),
    "index_copy": lambda i: X.index_copy(0, i, X),
    "index_fill": lambda i: X.index_fill(1, i, 2.0),
    "index_put": lambda i: X.index_put((i,), torch.zeros(())),
}


def raises(call) -> bool:
    try:
        call()
    except (IndexError, RuntimeError, eb.InputError):
        return True
    return False


@pytest.mark.parametrize("op", INDEX_OPS)
def test_an_index_out_of_range_raises_where_torch_does(op):
    function = INDEX_OPS[op]
    found = []
    for value in (-101, -100, -13, -12, -5, -4, -3, -1, 0, 2, 3, 4, 5, 11, 12, 99, 2**40):
        index = torch.tensor([0, 1, value])
        torchs = raises(lambda index=index: function(index))
        ours = raises(lambda index=index: eb.trace_function(function)(index.numpy()))
        found.append(torchs)
        assert ours == torchs, (value, "torch raises" if torchs else "torch does not")
    assert any(found) and not all(found)


def test_take_along_dim_counts_round_and_round_as_in_torch():
    index = torch.tensor([[-101], [-4], [99]])
    found = eb.trace_function(lambda x, i: torch.take_along_dim(x, i, 1))(X.numpy(), index.numpy())
    assert np.array_equal(found, torch.take_along_dim(X, index, 1).numpy())


@pytest.mark.parametrize(
    "op", ["embedding", "embedding of a cast", "one_hot", "gather", "index", "scatter", "index_add"]
)
def test_the_range_of_an_input_is_a_fact_of_the_traced_program(op):
    from etrace_bridge.frontend import trace_with_ranges

    function = eb.trace_function(INDEX_OPS[op])
    _, ranges = trace_with_ranges(
        lambda index: [function(index)], jax.ShapeDtypeStruct((3,), jnp.int64)
    )
    assert {(r.position, r.elements is None) for r in ranges} == {(0, True)}
    for value in (-101, -4, -1, 0, 2, 3, 4, 5, 99):
        index = torch.tensor([0, 1, value])
        assert raises(lambda i=index: [r.check(i.numpy(), "It") for r in ranges]) == raises(
            lambda i=index: INDEX_OPS[op](i)
        ), value


def test_only_the_column_that_is_an_index_is_checked():
    from etrace_bridge.frontend import trace_with_ranges

    function = eb.trace_function(
        lambda x: (
            F.embedding(x[:, 1].long(), WEIGHT) * x[:, :1] + F.embedding(x[:, 2].long() % 5, WEIGHT)
        )
    )
    _, ranges = trace_with_ranges(
        lambda x: [function(x)], jax.ShapeDtypeStruct((2, 3), jnp.float32)
    )
    (found,) = ranges  # what is computed from values is not known
    assert found.elements.tolist() == [1, 4]
    found.check(np.array([[99.5, 4.9, 99], [-1, 0, -1]]), "It")
    found.check(np.array([[[99, 4, 99], [-1, 0, -1]]] * 3), "A sequence")
    with pytest.raises(
        eb.InputError,
        match="It has the value 5.0, which is out of range: `embedding` takes indices from 0 to 4",
    ):
        found.check(np.array([[0, 0, 0], [0, 5.0, 0]]), "It")
    with pytest.raises(eb.InputError, match="the value nan, which is out of range"):
        found.check(np.array([[0, 0, 0], [0, np.nan, 0]]), "It")
    # one of two processes, with half of the batch: three steps
    found.check(np.array([[[99, 4, 99]]] * 3), "A part", parts=2)
    with pytest.raises(eb.InputError, match="A part has the value 5"):
        found.check(np.array([[[0, 0, 0]], [[0, 5, 0]], [[0, 0, 0]]]), "A part", parts=2)


def spoilt(data: torch.Tensor, value: int) -> torch.Tensor:
    return data.clone().index_put((torch.tensor([1]), torch.tensor([2])), torch.tensor(value))


@pytest.mark.x32
@pytest.mark.parametrize("value", [-1, CLASSES, 99, 2**40])
def test_labels_out_of_range_raise_in_every_call(tagger, value):
    bad = spoilt(LABELS, value)
    message = rf"target has the value {value}, which (is out of range: `cross_entropy` takes indices from 0 to 4|does not fit)"
    tagger.reset()
    tagger.step(IDS[0], LABELS[0])
    calls = {
        "step, quick": lambda: tagger.step(IDS[1], bad[1]),
        "step, checked": lambda: tagger.step(IDS[1], bad[1].tolist()),
        "gradients": lambda: tagger.gradients(IDS, bad),
        "update": lambda: tagger.update(IDS, bad),
        "evaluate": lambda: tagger.evaluate([(IDS, bad)]),
        "fit": lambda: tagger.fit([(IDS, bad)], progress=False),
    }
    for name, call in calls.items():
        with pytest.raises(eb.InputError, match=message):
            print(name)
            call()
    assert tagger.steps == tagger.runtime.store.steps
    ignored = spoilt(LABELS, -100)  # torch's `ignore_index`
    expected = [
        F.cross_entropy(y, t).item() for y, t in zip(make_tagger()(IDS), ignored, strict=True)
    ]
    assert tagger.gradients(IDS, ignored).losses.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.x32
@pytest.mark.parametrize("value", [-1, WORDS, 2**40])
def test_ids_out_of_range_raise_in_every_call(tagger, value):
    bad = spoilt(IDS, value)
    tagger.reset()
    tagger.step(IDS[0], LABELS[0])
    net = eb.wrap(make_tagger())
    net.init_state(batch_size=B)
    for call in (
        lambda: tagger.step(bad[1], LABELS[1]),
        lambda: tagger.step(bad[1].numpy()),
        lambda: tagger.gradients(
            jnp.asarray(bad.numpy()) if value < 2**31 else bad.numpy(), LABELS
        ),
        lambda: tagger.predict(bad),
        lambda: net(bad[1]),
    ):
        with pytest.raises(
            eb.InputError,
            match=rf"The (input|array) has the value {value}, which (is out of range|does not fit)",
        ):
            call()
    assert not raises(lambda: net(IDS[1]))


@pytest.mark.x32
def test_the_first_label_may_be_the_bad_one():
    for loss in (
        F.cross_entropy,
        lambda y, t: -y[torch.arange(B), t].mean(),
        lambda y, t: -y[np.arange(B), t].mean(),
    ):
        learner = eb.OnlineLearner(make_tagger(), "bptt", loss)
        with pytest.raises(eb.InputError, match="target has the value 99, which is out of range"):
            learner.gradients(IDS, spoilt(LABELS, 99))
