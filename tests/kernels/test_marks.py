"""What the forward marks for a filtered backward, and the lists that are made of it."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from loss_plugins.kernels import ops  # noqa: E402
from loss_plugins.kernels.triton import linear_ce, lists, marks  # noqa: E402
from loss_plugins.kernels.triton.lists import listed  # noqa: E402
from loss_plugins.kernels.triton.marks import MARKED_ROWS, is_markable, most_pairs, set_bits  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_strip")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BELOW = 2.0**-7
COUNT = torch.tensor(211)  # of rows, which lists hand on


def bits_of(words, vocab):
    """(blocks, vocab) bool of (blocks, ceil(vocab / 32)) int32."""
    bits = (words.cpu()[:, :, None] >> torch.arange(32)) & 1
    return bits.flatten(1)[:, :vocab].bool()


def words_of(bits):
    """The inverse, zeros behind the last column."""
    blocks, vocab = bits.shape
    bits = torch.nn.functional.pad(bits.long(), (0, -vocab % 32)).view(blocks, -1, 32)
    words = (bits << torch.arange(32)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def peaked(rows, width, vocab, dtype, device, often=20, rare=4, seed=0):
    """(hidden, weight, labels) of a model that knows: most of a row's probability is at two of ``often`` classes. Every tenth
    label is one of ``rare`` classes that few rows think of."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.nn.functional.normalize(torch.randn(vocab, width, generator=g), dim=1)
    likely, second = torch.randint(0, often, (2, rows), generator=g)
    hidden = 12 * weight[likely] + 8 * weight[second] + 0.3 * torch.randn(rows, width, generator=g)
    labels = likely.clone()
    labels[::10] = vocab - 1 - torch.randint(0, rare, (len(labels[::10]),), generator=g)
    labels[3::7] = -100
    return hidden.to(device, dtype), weight.to(device, dtype), labels.to(device)


def forward(hidden, weight, labels, below=BELOW, bound=1.0, bias=None, scale=1.0, softcap=0.0, ignore_index=-100):
    """(probabilities in float64, marks as bools by block of sorted rows, sorted rows, dropped)."""
    out = ops.linear_ce(
        hidden, weight, bias, labels, None, ignore_index, scale, softcap, 0.0, 0.0, hidden.dtype, False, False, below,
        below, True, 1 << 20, "triton", "triton", bound,
    )  # fmt: skip
    z = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    valid = labels != ignore_index
    order = torch.cat([valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]]).cpu()
    return z.softmax(1).cpu(), bits_of(out[6], len(weight)), order, out[5].cpu()


def mass(p, bits, order, valid):
    """(N,) the probability that the marks leave out of each row that counts."""
    lost = torch.zeros(len(order), dtype=torch.float64)
    for i, row in enumerate(order.tolist()):
        lost[row] = p[row, ~bits[i // MARKED_ROWS]].sum()
    return lost * valid


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 50, 5000])
@pytest.mark.parametrize("most", [1, 5, 300])
def test_set_bits(device, vocab, most):
    """The first of them, in every program and beyond what one reads at a time; bit 31 is a sign."""
    bits = torch.rand(1, vocab, generator=torch.Generator().manual_seed(0)) < 0.05
    bits[0, vocab // 2 :: 31] = True
    want = bits[0].nonzero()[:, 0][:most]
    columns, count = set_bits(words_of(bits)[0].to(device), most)
    assert columns.shape == (most,) and count.item() == len(want)
    assert torch.equal(columns[: len(want)].cpu(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_set_bits_of_nothing(device):
    assert set_bits(torch.zeros(70, dtype=torch.int32, device=device), 3)[1].item() == 0


def test_what_is_markable():
    assert is_markable(256, 128, torch.bfloat16) and is_markable(300, 256, torch.float16)
    assert not is_markable(255, 128, torch.bfloat16)
    assert not is_markable(256, 64, torch.bfloat16) and not is_markable(256, 128, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strips", [2, 5, 33])
def test_what_counts_is_marked_in_every_strip(device, strips, monkeypatch):
    """However the vocabulary is cut; more strips begin with less of the sum, so they mark no less."""
    hidden, weight, labels = peaked(300, 64, 4127, torch.bfloat16, device)
    p, one, order, _ = forward(hidden, weight, labels)
    monkeypatch.setattr(
        linear_ce, "programs_for", lambda rows, row_bytes, tiles, blocks, device: strips * (-(-rows // blocks.n))
    )
    _, bits, _, dropped = forward(hidden, weight, labels)
    valid = (labels != -100).cpu()
    for i, block in enumerate(order.split(MARKED_ROWS)):
        block = block[valid[block]]
        assert not ((p[block] >= BELOW * 1.001).any(0) & ~bits[i]).any()
    assert not (one & ~bits).any() and bits.sum() > one.sum()
    assert (mass(p, bits, order, valid) <= dropped + 1e-5).all() or (dropped == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1501, 2048])
@pytest.mark.parametrize("strips", [1, 5])
def test_statistics_beside_marks(device, strips, vocab, monkeypatch):
    """They are of all columns, and shares of one number in every strip; no label is the likeliest class of many rows."""
    hidden, weight, labels = peaked(300, 64, vocab, torch.bfloat16, device)
    labels = torch.where(labels == -100, -100, (labels * 7 + 3) % vocab)
    monkeypatch.setattr(
        linear_ce, "programs_for", lambda rows, row_bytes, tiles, blocks, device: strips * (-(-rows // blocks.n))
    )
    loss, nll, lse, entropy, predicted, *_ = ops.linear_ce(
        hidden, weight, None, labels, None, -100, 1.0, 0.0, 0.0, 0.0, hidden.dtype, True, True, BELOW, BELOW, True, 1 << 20,
        "triton", "triton", 0.5,
    )  # fmt: skip
    z, valid = hidden.double() @ weight.double().T, labels != -100
    want = torch.nn.functional.cross_entropy(z, labels, reduction="none")
    for got in (loss, nll):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lse.double()[valid], z.logsumexp(1)[valid], rtol=1e-6, atol=1e-5)
    spread = -(z.softmax(1) * z.log_softmax(1)).sum(1)
    torch.testing.assert_close(entropy.double()[valid], spread[valid], rtol=1e-4, atol=1e-5)
    assert torch.equal(predicted[valid], z.argmax(1)[valid]) and (predicted[~valid] == -100).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [(256, 64, 2016), (389, 72, 1501), (300, 64, 1), (300, 64, 33), (261, 36, 4127)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_counts_is_marked(device, dtype, shape):
    """Every column in which some row of a block reaches the threshold, and every label; few others."""
    rows, width, vocab = shape
    hidden, weight, labels = peaked(rows, width, max(vocab, 20), dtype, device)
    weight, labels = weight[:vocab], torch.where(labels == -100, -100, labels.clamp(max=vocab - 1))
    p, bits, order, dropped = forward(hidden, weight, labels)
    valid = (labels != -100).cpu()
    assert bits.shape == (-(-rows // MARKED_ROWS), vocab)
    marked = 0
    for i, block in enumerate(order.split(MARKED_ROWS)):
        block = block[valid[block]]
        counts = (p[block] >= BELOW * 1.001).any(0)
        counts[labels.cpu()[block]] = True
        assert not (counts & ~bits[i]).any()
        counts[vocab // 32 * 32 :] = True
        marked += counts.sum()
    lost = mass(p, bits, order, valid)
    assert (dropped[~valid] == 0).all()
    if vocab < 600:  # too large a part counts, so all of it is computed
        assert bits.sum() > most_pairs(*bits.shape) and (dropped == 0).all()
    else:
        assert bits.sum() <= min(most_pairs(*bits.shape), 2 * marked)
        assert (lost <= dropped + 1e-5).all() and lost.max() > 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "given", [{"scale": 0.8}, {"softcap": 20.0}, {"bias": True}, {"bias": True, "scale": 1.5, "softcap": 15.0}], ids=str
)
def test_marks_of_transformed_logits(device, given):
    hidden, weight, labels = peaked(300, 64, 1501, torch.bfloat16, device)
    given = dict(given)
    if "bias" in given:
        given["bias"] = torch.randn(1501, generator=torch.Generator().manual_seed(1)).div(2).to(device, torch.bfloat16)
        given["bias"][500] = 9.0  # a class that every row thinks of and that is nobody's label
    p, bits, order, dropped = forward(hidden, weight, labels, **given)
    valid = (labels != -100).cpu()
    for i, block in enumerate(order.split(MARKED_ROWS)):
        assert not ((p[block[valid[block]]] >= BELOW * 1.001).any(0) & ~bits[i]).any()
    assert "bias" not in given or bits[:2, 500].all()
    assert 0 < bits.sum() <= most_pairs(*bits.shape)
    assert (mass(p, bits, order, valid) <= dropped + 1e-5).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore_index", [0, 1500, 1501, 1 << 40, -1])
def test_rows_that_do_not_count_mark_nothing(device, ignore_index):
    """Whatever their label is: it need be no class."""
    hidden, weight, labels = peaked(400, 64, 1501, torch.bfloat16, device)
    labels = torch.where(labels == -100, ignore_index, labels.clamp(1, 1499))
    valid = (labels != ignore_index).cpu()
    hidden[~valid] = float("nan")
    p, bits, order, dropped = forward(hidden, weight, labels, ignore_index=ignore_index)
    p = torch.where(valid[:, None], p, 0.0)
    alone = forward(hidden[valid], weight, labels[valid], ignore_index=ignore_index)[1]
    blocks = -(-int(valid.sum()) // MARKED_ROWS)
    others = torch.arange(1501) != ignore_index  # a class that is the ignored label may be marked
    others[0] = False  # as may the first
    assert 0 < bits.sum() <= most_pairs(*bits.shape)
    assert not bits[blocks:, others].any()
    assert device == "cuda" or not (bits[:blocks] & ~alone)[:, others].any()
    # as a class it makes the reference tighter; on a GPU the strips are others
    assert 0 <= ignore_index < 1501 or device == "cuda" or torch.equal(bits[:blocks, others], alone[:, others])
    assert (dropped[~valid] == 0).all() and (mass(p, bits, order, valid) <= dropped + 1e-5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_all_ignored(device):
    hidden, weight, labels = peaked(300, 64, 1501, torch.bfloat16, device)
    _, bits, _, dropped = forward(hidden, weight, torch.full_like(labels, -100), bound=0.5)
    assert not bits[:, 1:].any() and (dropped == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_with_an_unsure_row_keeps_everything(device):
    """One row of the second block, whose softmax is flat, would lose nearly all; every other row loses little."""
    hidden, weight, labels = peaked(500, 64, 1501, torch.bfloat16, device)
    labels = torch.randint(0, 20, (500,), generator=torch.Generator().manual_seed(2)).to(device)  # much is wrong
    hidden[200] *= 0.02
    wide = forward(hidden, weight, labels)
    _, bits, _, dropped = forward(hidden, weight, labels, bound=0.5)
    assert wide[3][200] > 0.5 and mass(*wide[:3], torch.ones(500))[200] > 0.5 and not wide[1].all(1).any()
    assert bits.all(1).tolist() == [False, True, False, False]
    assert torch.equal(bits[[0, 2, 3]], wide[1][[0, 2, 3]])
    # with that block a quarter of all pairs count, so in the end all are computed
    assert (dropped == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_nearly_certain_model_is_computed_exactly(device):
    """Each row loses a thousandth, which no bound of a row forbids, but nothing else is wrong with it."""
    hidden, weight, labels = peaked(300, 64, 1501, torch.bfloat16, device)
    labels = (hidden.double() @ weight.double().T).argmax(1)
    hidden *= 1.6
    wide = forward(hidden, weight, labels)
    assert 0 < wide[3].max() < 0.5 and not wide[1].all(1).any()
    _, bits, _, dropped = forward(hidden, weight, labels, bound=0.5)
    assert bits.all() and (dropped == 0).all()
    # half of the labels at random: much is wrong, of which what is lost is little
    labels[::2] = torch.randint(0, 20, (150,), generator=torch.Generator().manual_seed(2)).to(device)
    assert not forward(hidden, weight, labels, bound=0.5)[1].all(1).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["hidden", "weight"])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_a_nan_keeps_everything(device, where):
    hidden, weight, labels = peaked(300, 64, 1501, torch.bfloat16, device)
    labels[7] = 3
    (hidden if where == "hidden" else weight)[7, 5] = float("nan")
    _, bits, _, dropped = forward(hidden, weight, labels, bound=0.5)
    assert bits.all() and (dropped == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4095, 4096, 4099])
def test_packed_words(device, vocab):
    """Labels count, and the last columns, which are no whole word; bits behind those are zeros, in whole blocks too."""
    g = torch.Generator().manual_seed(0)
    flags = torch.rand(3, vocab, generator=g) < 0.03
    sums = torch.ones(300, device=device)
    kept = torch.full((300,), 0.9, device=device)
    kept[290] = 0.2
    labels, count = torch.randint(-vocab, 2 * vocab, (300,), generator=g), torch.tensor(300, device=device)
    labels[40:200] = -100
    # no label's term, so nothing is certain
    zeros, improbable = torch.zeros(300, device=device), torch.full((300,), -1e4, device=device)
    rest = (vocab, labels.to(device), count, zeros, sums, kept, improbable)
    want = flags.clone()
    for row, label in enumerate(labels.tolist()):
        if 0 <= label < vocab:
            want[row // 128, label] = True
    want[:, vocab // 32 * 32 :] = True
    free = marks.marks_of(words_of(flags).to(device), *rest, 1.0, True)
    assert torch.equal(free.words.cpu(), words_of(want))
    got = marks.marks_of(words_of(flags).to(device), *rest, 0.5, True)
    want[2] = True
    assert torch.equal(got.words.cpu(), words_of(want))
    exact = bool(want.sum() > most_pairs(3, vocab))
    assert exact or vocab > 1
    assert got.dropped.tolist() == pytest.approx([0.0 if exact else 0.1] * 256 + [0.0] * 44)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_words_of_rows_that_do_not_count(device):
    """They mark nothing, with their labels or otherwise."""
    ones = torch.ones(300, device=device)
    labels, count = torch.arange(300, device=device), torch.tensor(200, device=device)
    got = marks.marks_of(
        torch.zeros(3, 11, dtype=torch.int32, device=device), 341, labels, count, ones, ones, ones, ones, 1.0, True
    )
    want = torch.zeros(3, 341, dtype=torch.bool)
    want[0, :128], want[1, 128:200] = True, True
    want[:2, 320:] = True
    assert torch.equal(got.words.cpu(), words_of(want))


@triton.jit
def _words_kernel(shares, out, below, FAST: tl.constexpr):  # noqa: N803
    o_c = tl.arange(0, 128)
    b_word = linear_ce.marked_words(
        tl.load(shares + tl.arange(0, 256)[:, None] * 128 + o_c[None, :]), below, 256, 128, FAST
    )
    tl.store(out + tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :], b_word)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fast", [False, True])
def test_marked_words(device, fast):
    """A bit for every column in which some row of a block has the share, in both orders of looking."""
    g = torch.Generator().manual_seed(0)
    shares = torch.rand(256, 128, generator=g) ** 40
    shares[3, 5], shares[200, 31], shares[255, 127], shares[140, 32] = 2**-7, 2**-7, 1.0, float("nan")
    shares[:, 6] = 2**-7 * (1 - 1e-6)
    out = torch.zeros(2, 4, dtype=torch.int32, device=device)
    _words_kernel[(1,)](shares.to(device), out, 2**-7, FAST=fast, num_warps=8)
    want = (shares >= 2**-7).view(2, 128, 128).any(1)
    assert want[0, 5] and want[1, 31] and want[1, 127] and not want[:, 6].any() and not want.all()
    want[1, 32] |= bool(bits_of(out, 128)[1, 32])  # a row that is no number is found by its sum
    assert torch.equal(bits_of(out, 128), want)


@triton.jit
def _places_kernel(bits, whether, place):
    i_slot = tl.program_id(0)
    o_c = tl.arange(0, 128)
    m_c, b_place = lists.place_in_tile(bits, i_slot, o_c)
    tl.store(whether + i_slot * 128 + o_c, m_c.to(tl.int32))
    tl.store(place + i_slot * 128 + o_c, b_place)


@pytest.mark.parametrize("device", DEVICES)
def test_place_in_tile(device):
    bits = torch.rand(9, 128, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 9)[:, None]
    counts = bits.view(9, 4, 32).sum(2)
    slots = torch.cat([words_of(bits), counts.cumsum(1) - counts], 1).to(device, torch.int32)
    whether, place = (torch.full((9, 128), -1, dtype=torch.int32, device=device) for _ in range(2))
    _places_kernel[(9,)](slots, whether, place)
    assert torch.equal(whether.cpu().bool(), bits)
    assert torch.equal(place.cpu(), (bits.cumsum(1) - bits.long()).int())


def some_bits(blocks, vocab, kind):
    """Marks of about one pair in fourteen: at random, or as a language's are, a few columns for all blocks."""
    g = torch.Generator().manual_seed(0)
    if kind == "random":
        return torch.rand(blocks, vocab, generator=g) < 0.07
    if kind == "none":
        return torch.zeros(blocks, vocab, dtype=torch.bool)
    often = torch.rand(vocab, generator=g) ** 30
    bits = torch.rand(blocks, vocab, generator=g) < often
    bits[blocks // 2] = False  # a block without any
    return bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["random", "language", "none"])
@pytest.mark.parametrize(
    ("blocks", "vocab", "capacity"),
    [
        (3, 1001, 512),
        (3, 1001, 600),
        (3, 1001, 1 << 20),
        (5, 128, 1000),
        (17, 700, 2700),
        (2, 130, 300),
        (3, 4096, 600),
    ],
)
def test_every_pair_is_listed_once(device, blocks, vocab, capacity, kind, ordered):
    bits = some_bits(blocks, vocab, kind)
    total = int(bits.sum())
    assert total <= most_pairs(blocks, vocab)
    lists = listed(words_of(bits).to(device), COUNT.to(device), vocab, capacity, ordered)
    order, columns = lists.order.tolist(), lists.columns.tolist()
    starts, vectors, sizes = lists.lists.tolist(), lists.vectors.tolist(), lists.sizes.tolist()
    assert not lists.everything.item() and sorted(order) == list(range(vocab))
    assert ordered or order == list(range(vocab))
    assert (lists.some.item(), lists.whole.item()) == (211, 0)

    # a block's list, over the rounds
    for i in range(blocks):
        mine = [columns[starts[i][r] + k] for r in range(lists.rounds) for k in range(sizes[i][r])]
        assert sorted(mine) == bits[i].nonzero()[:, 0].tolist()
    # rounds: within the capacity, one block's vectors behind another's, the first ones used
    for r in range(lists.rounds):
        column = [sizes[i][r] for i in range(blocks)]
        assert sum(column) <= max(capacity, 128 + 128 * blocks)
        assert [vectors[i][r] for i in range(blocks)] == [sum(column[:i]) for i in range(blocks)]
        assert lists.chunks[:, r].tolist() == [sum(-(-n // 128) for n in column[:i]) for i in range(blocks + 1)]
        assert r < lists.decided[1].item() or not any(column)
    # a tile's pairs lie in its round, where the block's list has the same column
    edges, seen = lists.edges.tolist(), 0
    for r in range(lists.rounds):
        for t in range(edges[r], edges[r + 1]):
            for slot in range(lists.live[t].item()):
                i, words = lists.block_of[t, slot].item(), lists.bits[t, slot].cpu()
                inside = bits_of(words[None, :4], 128)[0].nonzero()[:, 0].tolist()
                assert inside and words[4:].tolist() == [sum(c < 32 * k for c in inside) for k in range(4)]
                for place, c in enumerate(inside):
                    k = lists.base[t, slot].item() + place - vectors[i][r]
                    assert 0 <= k < sizes[i][r] and columns[starts[i][r] + k] == order[t * 128 + c]
                    seen += 1
    assert seen == total and edges[0] == 0 and edges[-1] == lists.live.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [17, 127, 128])
def test_columns_of_many_blocks_come_first(device, blocks):
    """So that a tile's columns count for about the same blocks, and the columns that count for none for nothing."""
    bits = some_bits(blocks, 700, "language")
    often = bits.sum(0)[listed(words_of(bits).to(device), COUNT.to(device), 700, 1 << 20, True).order.cpu()]
    several = often[often * 8 >= blocks]
    assert len(several) > 3 and torch.equal(several, often[: len(several)]) and (several.diff() <= 0).all()
    assert (often[(often > 0).sum() :] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_too_many_pairs_are_not_listed(device):
    bits = torch.zeros(3, 1200, dtype=torch.bool)
    bits[0, : most_pairs(3, 1200)] = True
    lists = listed(words_of(bits).to(device), COUNT.to(device), 1200, 1 << 20, True)
    assert not lists.everything.item() and lists.sizes.sum().item() == most_pairs(3, 1200)
    bits[1, 7] = True
    lists = listed(words_of(bits).to(device), COUNT.to(device), 1200, 1 << 20, True)
    assert lists.decided.tolist() == [1, 0] and (lists.some.item(), lists.whole.item()) == (0, 211)
    assert not lists.sizes.any() and not lists.chunks.any() and not lists.edges.any()
