"""Tool calling, apart from HTTP and the engine: what requests ask, what models read and write."""

from __future__ import annotations

from .definitions import Tool, ToolChoice, validate_tool_choice, validate_tools
from .formats import FALLBACK, FORMATS, ToolFormat, ToolSupport, find_format, tool_support
from .grammar import tool_constraint
from .messages import normalise_messages
from .parser import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedText,
    ToolCallParser,
    new_call_id,
    parse_text,
)
from .preamble import prepare_messages, render_preamble

__all__ = [
    "FALLBACK",
    "FORMATS",
    "ArgumentsDelta",
    "CallStarted",
    "ContentDelta",
    "Delta",
    "ParsedCall",
    "ParsedText",
    "Tool",
    "ToolCallParser",
    "ToolChoice",
    "ToolFormat",
    "ToolSupport",
    "find_format",
    "new_call_id",
    "normalise_messages",
    "parse_text",
    "prepare_messages",
    "render_preamble",
    "tool_constraint",
    "tool_support",
    "validate_tool_choice",
    "validate_tools",
]
