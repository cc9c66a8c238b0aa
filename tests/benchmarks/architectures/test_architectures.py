"""Counts against published ones: parameters and tensors of the model zoos, MACs and sizes of the papers' tables."""

from pathlib import Path

import pytest

from architectures import ARCHITECTURES

# Parameters and tensors as torchvision and transformers report them; LSTM-PTB and Caffe's GoogLeNet by hand below.
PUBLISHED = {
    "resnet50": (25_557_032, 161),
    "resnet152": (60_192_808, 467),
    "vgg16": (138_357_544, 32),
    "vgg19": (143_667_240, 38),
    "densenet201": (20_013_928, 604),
    "bert_base": (109_482_240, 199),
    "bert_large": (335_141_888, 391),
    "gpt2": (124_439_808, 148),
    "lstm_ptb": (10_000 * 1500 + 2 * (2 * 6000 * 1500 + 2 * 6000) + 1500 * 10_000 + 10_000, 11),
    "googlenet": (13_378_280, 128),
}
# Billions of multiply-accumulates for one sample; MG-WFBP's Table 4, but VGG-16 from torchvision's model card.
PUBLISHED_GMACS = {"resnet50": 3.9, "resnet152": 11.61, "densenet201": 4.39, "vgg16": 15.47}
MIB = 2**20


def parameters(name):
    return [parameter for layer in ARCHITECTURES[name].layers() for parameter in layer.parameters]


def gmacs(name):
    return sum(layer.macs for layer in ARCHITECTURES[name].layers()) / 1e9


def test_every_architecture_has_a_published_count():
    assert PUBLISHED.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_tensors_are_as_published(name):
    assert (sum(p.numel for p in parameters(name)), len(parameters(name))) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_two_parameters_share_a_name(name):
    names = [p.name for p in parameters(name)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_multiply_accumulates_are_within_five_percent_of_the_published(name):
    assert gmacs(name) == pytest.approx(PUBLISHED_GMACS[name], rel=0.05)


def test_lstm_ptb_has_66_million_parameters():
    assert round(sum(p.numel for p in parameters("lstm_ptb")) / 1e6) == 66


def test_bert_layers_follow_the_closed_form():
    width, ffn = 768, 3072
    block = 4 * (width * width + width) + 2 * width * ffn + ffn + width + 2 * 2 * width
    embeddings = (30522 + 512 + 2) * width + 2 * width
    assert sum(p.numel for p in parameters("bert_base")) == embeddings + 12 * block + width * width + width


@pytest.mark.parametrize(("name", "width", "mib"), [("bert_base", 768, 420.02), ("bert_large", 1024, 1282.60)])
def test_hipress_counts_bert_with_its_pretraining_heads(name, width, mib):
    words = 30522
    masked_word = width * width + width + 2 * width + words  # dense, layer norm, and the tied decoder's bias
    next_sentence = 2 * width + 2
    total = sum(p.numel for p in parameters(name)) + masked_word + next_sentence
    assert total * 4 / MIB == pytest.approx(mib, abs=0.005)


def test_hipress_table_6_gives_our_vgg19():
    sizes = [p.numel * 4 / MIB for p in parameters("vgg19")]
    assert (round(sum(sizes), 2), max(sizes), len(sizes)) == (548.05, 392, 38)


def test_googlenet_without_auxiliary_classifiers_has_the_7_million_of_caffes_deployed_model():
    deployed = [p for p in parameters("googlenet") if not p.name.startswith("aux")]
    assert (sum(p.numel for p in deployed), len(deployed)) == (6_998_552, 116)


def test_mgwfbps_59_tensors_are_googlenets_convolution_weights_and_its_last_layer():
    names = [p.name for p in parameters("googlenet") if not p.name.startswith("aux")]
    counted = [name for name in names if name.endswith("conv.weight") or name.startswith("fc.")]
    assert len(counted) == 59  # yet the ~13M of the same row are those of the network with both classifiers
    assert round(sum(p.numel for p in parameters("googlenet")) / 1e6) == 13


def test_the_first_convolution_computes_no_gradient_of_the_image():
    first, second = [layer for layer in ARCHITECTURES["vgg16"].layers() if layer.parameters][:2]
    assert sum(work.macs for work in first.backward) == first.macs
    assert sum(work.macs for work in second.backward) == 2 * second.macs


def test_the_documented_table_is_what_the_architectures_give():
    text = (Path(__file__).parents[3] / "docs" / "traces.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line]
    assert {row[0].strip("`"): row[1:] for row in rows} == {name: documented(name) for name in ARCHITECTURES}


def documented(name):
    architecture, tensors = ARCHITECTURES[name], parameters(name)
    total = sum(p.numel for p in tensors)
    counts = [str(len(tensors)), f"{total:,}", f"{gmacs(name):.3f}", str(architecture.batch)]
    return [architecture.model, *counts, architecture.sample]
