"""A model's tokenizer: the library's object and the few facts around it, read from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import ModelFileError
from .fields import read_json

__all__ = ["TokenizerSpec", "read_tokenizer_folder"]


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer and how its model wants text.

    Call `tokenizer.encode(text, add_special_tokens=False)` and put `bos_token` first where
    `add_bos` says so and no chat template wrote it; then nothing is added twice.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    pad_token: str | None = None


def read_tokenizer_folder(folder: Path) -> TokenizerSpec:
    """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a folder.

    Raises:
        ModelFileError: `tokenizer.json` is missing or unreadable.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(
            f"{path} is missing; copy it from the model's origin, or write it with "
            "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path}: no readable tokenizer: {error}") from error
    # Some published files cut and pad what they encode, which would change prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    bos = _content(config.get("bos_token"))
    return TokenizerSpec(
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, config),
        bos_token=bos,
        eos_token=_content(config.get("eos_token")),
        add_bos=bos is not None and _adds_bos(tokenizer, config, bos),
        pad_token=_content(config.get("pad_token")),
    )


def _content(token: object) -> str | None:
    # A token is a string, or an object with the string and its flags.
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _adds_bos(tokenizer: Tokenizer, config: Mapping[str, Any], bos: str) -> bool:
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    bos_id = tokenizer.token_to_id(bos)
    return bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [each for each in template if isinstance(each, Mapping)]
        named = {each.get("name"): each.get("template") for each in entries}
        template = named.get("default", next(iter(named.values()), None))
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{folder}/tokenizer_config.json: chat_template is no string")
    return template
