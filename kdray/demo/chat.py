"""The chat form of the demo model: Kimi K2's messages, without a default system message."""

from __future__ import annotations

from collections.abc import Iterable

from kdray.demo.text.document import Turn

ROLE_MARKS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
OTHER_MARK = "<|im_system|>"
MIDDLE, END = "<|im_middle|>", "<|im_end|>"
GENERATION_PROMPT = "<|im_assistant|>assistant<|im_middle|>"

CHAT_TEMPLATE = """\
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- if role == 'user' -%}<|im_user|>
  {%- elif role == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>
  {%- endif -%}
  {{- message['name'] if message['name'] else role -}}<|im_middle|>
  {%- if role == 'tool' -%}{{ '## Return of ' ~ message['tool_call_id'] ~ '\\n' }}{%- endif -%}
  {%- if message['content'] is string -%}{{- message['content'] -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}
      {{- part['text'] -}}
    {%- endfor -%}
  {%- endif -%}
  {%- if message['tool_calls'] -%}<|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      {%- set arguments = call['function']['arguments'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {{- arguments if arguments is string else (arguments | tojson) -}}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>
  {%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def opening_of(turn: Turn) -> tuple[str, str]:
    """The mark of a turn's role, and the name written after it."""
    return ROLE_MARKS.get(turn.role, OTHER_MARK), turn.role


def render(turns: Iterable[Turn], generation_prompt: bool = False) -> str:
    """The text of a chat; the same text as ``CHAT_TEMPLATE`` makes of it."""
    text = "".join(
        f"{mark}{name}{MIDDLE}{turn.content}{END}"
        for turn in turns
        for mark, name in [opening_of(turn)]
    )
    return text + GENERATION_PROMPT if generation_prompt else text
