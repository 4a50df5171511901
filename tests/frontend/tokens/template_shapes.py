"""Small chat templates, each with the shape of a family of real ones: the ways in which they read
messages, calls, tools and reasoning.
"""

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PARTS = (
    "{% macro text(content) %}{% if content is string %}{{ content }}"
    "{% elif content is iterable and content is not mapping %}"
    "{% for part in content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ content }}{% endif %}{% endmacro %}"
)
_JSON_CALLS = (
    "{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
)

SHAPES: dict[str, str] = {
    "turns": _TURNS,
    "turns for training": (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.role }}:{{ m.content }}{% endif %}\n"
        "{% endfor %}"
    ),
    "roles joined to marks": (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + "
        "'<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
    ),
    "stripped content": (
        "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content | trim }}"
        "<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
    ),
    "no system, alternating": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "system before the first user": (
        "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}"
        "{% endif %}"
        "{% for m in rest %}{% if m['role'] == 'user' %}[INST] {% if loop.first and s %}{{ s }}\n\n"
        "{% endif %}{{ m['content'].strip() }} [/INST]{% else %} {{ m['content'] + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "tools as JSON lines": (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if m.content %}\n{{ m.content }}{% endif %}{% if m.tool_calls %}" + _JSON_CALLS +
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "content in a call's turn added to": (
        "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
        "{{ '<|a|>' + m.content + '<|c|>' }}" + _JSON_CALLS + "{% else %}"
        "{{ m.role + ': ' + m.content }}{% endif %}{{ eos_token }}{% endfor %}"
        "{{ tools | tojson(indent=4) if tools is not none else '' }}"
    ),
    "thoughts cut out of old turns": (
        "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}{% if ns.last < 0 and "
        "m.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}"
        "{% endfor %}{% for m in messages %}{% set content = m.content if m.content is string "
        "else '' %}{% set thoughts = '' %}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}"
        "{% elif '</think>' in content %}{% set thoughts = content.split('</think>')[0] %}"
        "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{% if loop.index0 > ns.last and thoughts %}<think>\n"
        "{{ thoughts.strip('\\n') }}\n</think>\n\n{% endif %}{{ content }}{% if m.tool_calls %}"
        + _JSON_CALLS + "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "one call at most": (
        "{{ bos_token }}{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|h|>assistant<|/h|>"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot|>'
        "{% elif m.role == 'tool' %}<|h|>ipython<|/h|>{{ m.content | tojson }}<|eot|>"
        "{% else %}<|h|>{{ m.role }}<|/h|>{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    ),
    "content as parts": (
        "{% for m in messages %}<|h|>{{ m['role'] }}<|/h|>{% if m['content'] is string %}"
        "{{ m['content'] }}{% else %}{% for part in m['content'] %}{{ part['text'] | trim }}"
        "{% endfor %}{% endif %}{% if 'tool_calls' in m and m.tool_calls | length > 0 %}"
        "{% for c in m.tool_calls %}[{{ c.function.name }}({% for k, v in "
        "c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
        "{% endfor %})]{% endfor %}{% endif %}<|eot|>{% endfor %}"
    ),
    "call ids of nine": (
        "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if not c.id is defined or c.id | length != 9 %}{{ raise_exception('id of 9') }}"
        "{% endif %}{{ (c.function | tojson)[:-1] }}, \"id\": \"{{ c.id[-9:] }}\"}"
        "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]"
        '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id[-9:] }}"}[/TOOL_RESULTS]'
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] {{ m.content }}"
        "[/INST]{% endif %}{% endfor %}"
    ),
    "alternating but for calls": (
        "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role == 'user' or "
        "(m.role == 'assistant' and m.tool_calls is not defined) %}{% if (m.role == 'user') != "
        "(ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}[/]{% endfor %}"
    ),
    "arguments added as text": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'assistant' and m['tool_calls'] %}"
        "<|Assistant|>{% for c in m['tool_calls'] %}{{ '<|call|>' + c['function']['name'] + "
        "'\\n```json\\n' + c['function']['arguments'] + '\\n```' + '<|/call|>' }}{% endfor %}"
        "<|end|>{% elif m['role'] == 'tool' %}<|output|>{{ m['content'] }}<|/output|>"
        "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    ),
    "arguments added as text where the content is none": (
        "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
        "{% if m['content'] is none %}{{ '<|a|>' }}{% else %}{{ '<|a|>' + m['content'] }}"
        "{% endif %}"
        "{% for c in m.tool_calls %}{{ c.function.name + '<sep>' + c.function.arguments }}"
        "{% endfor %}{% else %}{{ m.role + m.content.split('</think>') | last }}{% endif %}"
        "<|end|>{% endfor %}"
    ),
    "keys and values": (
        _PARTS + "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        "{% endif %}{% for m in messages %}<|{{ m.role }}|>\n{{ text(m.content) }}"
        "{% if m.role == 'assistant' %}{% if m.reasoning_content is string %}<think>"
        "{{ m.reasoning_content.strip() }}</think>{% endif %}{% for c in m.tool_calls or [] %}"
        "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
        "</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    ),
    "parameters": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is defined and m.content "
        "is string and m.content | trim | length > 0 %}{{ m.content | trim }}\n{% endif %}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function if c.function is defined else c %}"
        "<tool_call>\n<function={{ f.name }}>\n{% if f.arguments is defined %}{% for k, v in "
        "f.arguments | items %}<parameter={{ k }}>\n{{ v | tojson | safe if v is mapping or (v is "
        "sequence and v is not string) else v | string }}\n</parameter>\n{% endfor %}{% endif %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    ),
    "channels": (
        "{% macro kind(p) %}{% if p.type == 'string' %}string{% else %}{{ p.type }}{% endif %}"
        "{% if p.description %} // {{ p.description }}{% endif %}{% endmacro %}"
        "{% for tool in tools or [] %}{% set f = tool.function %}"
        "// {{ f.description + '\\n' }}type "
        "{{ f.name }} = ({% for k, p in (f.parameters.properties or {}).items() %}{{ k }}: "
        "{{ kind(p) }},{% endfor %}) => any;\n{% endfor %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% if '<|channel|>analysis' in m.content %}"
        "{{ raise_exception('channel') }}{% endif %}{% if m.tool_calls %}{% if m.content and "
        "m.thinking %}{{ raise_exception('content or thinking') }}"
        "{% elif m.content or m.thinking %}"
        "<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|channel|>commentary to={{ f.name }}<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>{{ m.content }}"
        "<|end|>{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "sections of calls": (
        "{% for m in messages %}{% set name = m.get('name', m['role']) %}<|{{ m.role }}|>{{ name }}"
        "<|middle|>{{ m.content }}{% if m.get('tool_calls') %}<|section|>{% for c in "
        "m['tool_calls'] %}<|begin|>{{ c['id'] }}<|arg|>{% if c['function']['arguments'] is string "
        "%}{{ c['function']['arguments'] }}{% else %}{{ c['function']['arguments'] | tojson }}"
        "{% endif %}<|end|>{% endfor %}<|/section|>{% endif %}<|im_end|>{% endfor %}"
    ),
    "content that is no text as JSON": (
        "{% for m in messages %}{% set content = m['content'] %}{% if content is not string %}"
        "{% set content = content | tojson %}{% endif %}{{ bos_token if loop.first }}<|{{ m.role }}"
        "|>{% if '</think>' in content and not loop.last %}{{ content.split('</think>')[-1] | trim "
        "}}{% else %}{{ content }}{% endif %}{% for c in m.tool_calls or [] %}"
        "[{{ c.function | tojson }}]{% endfor %}{% endfor %}"
    ),
    "content printed as it is": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %} -> "
        "{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}\n{% endfor %}"
    ),
    "the date and documents": (
        "{% if tools is defined and tools %}tools {{ strftime_now('%Y') }}\n{% endif %}"
        "{% if documents %}{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}"
        "{% endif %}{% for m in messages %}{{ m['role'] }}|{{ m['content'] }}\n{% endfor %}"
    ),
    "thinking switched": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% if m.thinking %}<think>{{ m.thinking }}"
        "</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% else %}{{ m.role }}{{ m.content }}{% endif %}{% endfor %}"
        "{{ '<think>' if thinking else '</think>' }}"
    ),
    "loops that break": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if loop.index > 20 %}{% break %}{% endif %}{{ m.role }}:{% if m.content is none %}"
        "(none){% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | string | length }}{% endfor %}\n{% endfor %}"
    ),
    "results of one turn together": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.index0 == 0 or "
        "messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}<r>{{ m.content }}</r>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}"
        "{% else %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}" + _JSON_CALLS +
        "{% endif %}<|end|>{% endif %}{% endfor %}"
    ),
    "tools of the system message": (
        "{% for m in messages %}{% if m.role == 'system' and tools %}<|system|>{{ m.content }}"
        "<|tool|>{{ tools | map(attribute='function') | list | tojson }}<|/tool|><|end|>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
    ),
    "reasoning budgets": (
        "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{% if m.role == 'assistant' and "
        "m.reasoning_content is defined and m.reasoning_content is string and "
        "m.reasoning_content | trim | length > 0 %}<seed:think>{{ m.reasoning_content | trim }}"
        "</seed:think>{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}<call>"
        "{{ c.function.name }}{% for k in c.function.arguments %} {{ k }}={{ "
        "c.function.arguments[k] }}{% endfor %}</call>{% endfor %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
    ),
}  # fmt: skip
