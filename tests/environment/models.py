"""Tokenizers and chat templates in the style of known models, built within a test."""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The answer is 42. What is six times seven?\n\nIt is the product of two whole numbers.\n",
    '<tool_response>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_response>\n',
    "user\nassistant\ntool\nsystem\nipython\n\n  def f(x):\n    return x  \n",
] * 4
WORDS = r"'s|'t|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
QWEN25 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nAnswer in <tool_call></tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# It strips earlier thinking, and thinks in a generation prompt.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
    if '</think>' in m.content else '' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- said + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
# It strips what users write, and quotes what tools return as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- m.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{{- m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
ALTERNATES = """\
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"""
MISTRAL = f"""\
{{{{- bos_token }}}}
{{%- for m in messages %}}{ALTERNATES}
{{%- if m.role == 'user' %}}{{{{- '[INST] ' + m.content + ' [/INST]' }}}}
{{%- else %}}{{{{- ' ' + m.content + eos_token }}}}{{%- endif %}}
{{%- endfor %}}"""
GEMMA = f"""\
{{{{- bos_token }}}}
{{%- for m in messages %}}{ALTERNATES}
{{%- set role = 'model' if m.role == 'assistant' else m.role %}}
{{{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<start_of_turn>model\\n' }}}}{{%- endif %}}"""
# A tool's answer is followed by no generation prompt. Sampled text goes on right after it.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
{{- '<｜Assistant｜>' }}{%- endif %}"""
# An assistant's turn has no end. The next role's token ends it.
GLM = """\
{{- '[gMASK]<sop>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# Template without special tokens.
WORDED = """\
{%- for m in messages %}{{- ' ' + m.role.upper() + ': ' + m.content }}
{%- if m.role == 'assistant' %}{{- eos_token }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}"""


@dataclass(frozen=True)
class Style:
    """Style of a model."""

    template: str
    end: str
    """Text of the token that ends a turn."""
    special: tuple[str, ...]
    tags: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    kind: str = "bytes"
    """Kind of the tokenizer: `bytes` (as Qwen's and Llama 3's) or a way to put a space before
    words (as SentencePiece)."""
    roles: tuple[str, ...] = ("user", "tool")
    """Roles that a message after a turn may have."""
    strips: tuple[str, ...] = ()
    """Roles whose contents the template strips."""
    quotes: tuple[str, ...] = ()
    """Roles whose contents the template quotes as JSON."""
    unknown: str | None = None
    """Token of unknown characters."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def written(self, role: str, content: str) -> str:
        """Return a content as the template writes it."""
        if role in self.quotes:
            return json.dumps(content, ensure_ascii=False)[1:-1]
        return content.strip() if role in self.strips else content


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_HEADERS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_SENTENCES = ("<s>", "</s>")
STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", _IM),
    # SmolLM2 and GPT-2 have such a token.
    "unknown-is-end": Style(CHATML, "<|im_end|>", _IM, unknown="<|im_end|>"),
    "qwen2.5": Style(QWEN25, "<|im_end|>", _IM, _TOOLS[:2]),
    "qwen3": Style(QWEN3, "<|im_end|>", _IM, _TOOLS + _THINK),
    "qwen3-no-thinking": Style(
        QWEN3, "<|im_end|>", _IM, _TOOLS + _THINK, arguments={"enable_thinking": False}
    ),
    "hermes-special-tags": Style(QWEN25, "<|im_end|>", (*_IM, *_TOOLS, *_THINK)),
    "llama3": Style(
        LLAMA3,
        "<|eot_id|>",
        _HEADERS,
        bos="<|begin_of_text|>",
        strips=("user",),
        quotes=("tool",),
    ),
    "mistral-first": Style(MISTRAL, "</s>", _SENTENCES, bos="<s>", kind="first", roles=("user",)),
    "mistral-legacy": Style(MISTRAL, "</s>", _SENTENCES, bos="<s>", kind="legacy", roles=("user",)),
    "mistral-always": Style(MISTRAL, "</s>", _SENTENCES, bos="<s>", kind="always", roles=("user",)),
    "gemma": Style(
        GEMMA,
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        tags=("\n\n", "<h1>"),
        bos="<bos>",
        kind="never",
        roles=("user",),
        strips=("user",),
    ),
    "deepseek": Style(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        tags=_THINK,
        bos="<｜begin▁of▁sentence｜>",
    ),
    "glm": Style(
        GLM,
        "<|observation|>",
        ("[gMASK]", "<sop>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        tags=_TOOLS,
    ),
    "worded": Style(WORDED, "</s>", _SENTENCES, kind="legacy"),
    "worded-bytes": Style(WORDED, "</s>", _SENTENCES),
}


@cache
def tokenizer_of(style: str) -> Any:
    """Return the tokenizer of a style, with its chat template."""
    given = STYLES[style]
    backend = _trained(given.kind)
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in given.special]
    )
    backend.add_tokens([AddedToken(one, normalized=False) for one in given.tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=given.end,
        bos_token=given.bos,
        unk_token=given.unknown or (None if given.kind == "bytes" else "<unk>"),
    )
    tokenizer.chat_template = given.template
    return tokenizer


def _trained(kind: str) -> Tokenizer:
    return _byte_level() if kind == "bytes" else _sentences(kind)


def _byte_level() -> Tokenizer:
    """Return a tokenizer as Qwen's and Llama 3's."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentences(kind: str) -> Tokenizer:
    """Return a tokenizer as Llama 2's. `kind`: when it puts a space before a text: `legacy` and
    `always` after each special token, `first` at the beginning only, `never`."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([] if kind == "never" else [decoders.Strip(" ", 1, 0)]),
        ]
    )
    bytes_ = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=bytes_, initial_alphabet=["▁"], show_progress=False
    )
    words = [word for text in CORPUS for word in text.split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    return _with_plain_bytes(tokenizer)


def _with_plain_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose byte tokens are in its vocabulary only, as Llama 2's."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(content))
