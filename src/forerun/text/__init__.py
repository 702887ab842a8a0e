"""Text in and out: tokens from text, text from tokens as they come, prompts from chat messages."""

from __future__ import annotations

from .detokenizer import IncrementalDetokenizer
from .template import ChatTemplate, require_template
from .tokenizer import TextCodec

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "TextCodec", "require_template"]
