"""The corpus: what is read, what is held out, and the entropies it is described by."""

import math

import pytest
import torch

from examples.text_corpus import (
    bigram_entropy,
    load_corpus,
    sample_batch,
    spread_windows,
    unigram_entropy,
)


def as_text(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def test_entropies_of_known_texts():
    alternating = torch.tensor([65, 66] * 500, dtype=torch.uint8)
    assert unigram_entropy(alternating) == pytest.approx(math.log(2))
    assert bigram_entropy(alternating) == pytest.approx(0, abs=1e-5)
    generator = torch.Generator().manual_seed(0)
    independent = torch.randint(4, (200_000,), generator=generator).to(torch.uint8)
    assert unigram_entropy(independent) == pytest.approx(math.log(4), abs=1e-3)
    assert bigram_entropy(independent) == pytest.approx(math.log(4), abs=1e-3)


def test_standard_library_is_the_default_and_repeatable():
    corpus = load_corpus(max_bytes=1 << 20)
    size = len(corpus.train) + len(corpus.held_out)
    assert size == 1 << 20
    assert len(corpus.held_out) / size == pytest.approx(0.1, abs=0.05)
    assert b"import" in as_text(corpus.train[:50_000])
    again = load_corpus(max_bytes=1 << 20)
    assert torch.equal(corpus.train, again.train) and torch.equal(corpus.held_out, again.held_out)
    # Source text: a byte says much about the next one, but not nearly all.
    assert 2.2 < bigram_entropy(corpus.train) < 2.7 < unigram_entropy(corpus.train) < 3.5


def test_folder_is_read_in_order_without_hidden_empty_and_binary_files(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>")
    (tmp_path / "05.bin").write_bytes(b"\0\1\2")
    (tmp_path / "06.empty").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    corpus = load_corpus(tmp_path)
    assert as_text(corpus.held_out) == b"<05><15>"
    assert as_text(corpus.train) == b"".join(b"<%02d>" % i for i in range(20) if i not in (5, 15))


def test_cap_keeps_what_is_held_out(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>")
    assert as_text(load_corpus(tmp_path, max_bytes=82).held_out) == b"<05><15>"
    assert as_text(load_corpus(tmp_path, max_bytes=122).held_out) == b"<05><15><25>"


def test_single_file_is_cut_into_pieces(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(1, 201)))
    corpus = load_corpus(file)
    assert sorted(as_text(corpus.train) + as_text(corpus.held_out)) == list(range(1, 201))
    assert as_text(corpus.held_out)[:4] == bytes([11, 12, 31, 32])


@pytest.mark.parametrize("content", [None, b"", b"ab", b"\0" * 100])
def test_nothing_to_read_is_an_error(tmp_path, content):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data='.*text'"):
        load_corpus(file)


def test_batches_are_windows_and_their_next_bytes():
    text = torch.arange(250, dtype=torch.uint8)
    inputs, targets = sample_batch(text, 4, 10, torch.Generator().manual_seed(3))
    assert inputs.shape == targets.shape == (10, 4) and inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    again = sample_batch(text, 4, 10, torch.Generator().manual_seed(3))
    other = sample_batch(text, 4, 10, torch.Generator().manual_seed(4))
    assert torch.equal(inputs, again[0]) and not torch.equal(inputs, other[0])


def test_spread_windows_reach_from_start_to_end():
    text = torch.arange(251, dtype=torch.uint8)
    windows = spread_windows(text, 2, 10, 3)
    assert len(windows) == 3
    assert windows[0][0][0, 0] == 0 and windows[-1][1][-1, -1] == 250
    for inputs, targets in windows:
        assert inputs.shape == (10, 2) and torch.equal(targets, inputs + 1)
