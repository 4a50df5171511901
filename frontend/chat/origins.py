"""The paths of a chat's parts in the body of the client, by which errors name them."""

import msgspec

from tandem.runtime.errors import InvalidRequestError


class Origins(msgspec.Struct, frozen=True, kw_only=True):
    """The paths in a body of chat; those of other APIs are given where the chat is made."""

    prompt: str = "messages"
    continued: str = "continue_final_message"
    max_tokens: str = "max_tokens"
    stop: str = "stop"
    format: str = "response_format"
    schema: str = "response_format.json_schema.schema"
    listed: str = "tools"
    choice: str = "tool_choice"
    chosen: str = "tool_choice.function.name"
    allowed: str = "tool_choice.allowed_tools"
    parameters: str = "parameters"  # the schema, within a tool
    tools: list[str] | None = None  # of each tool
    messages: list[str] | None = None  # of each message

    def tool(self, index: int) -> str:
        """Return the path of a tool's function."""
        return f"tools[{index}].function" if self.tools is None else self.tools[index]

    def calls(self, index: int) -> str:
        """Return the path of a message's calls."""
        return f"messages[{index}].tool_calls" if self.messages is None else self.messages[index]

    def named(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error about a field of the chat as one about the field of the client."""
        field = self._of_client(error.param or "")
        if field == error.param or error.param is None:
            return error
        message = error.message.replace(f"`{error.param}`", f"`{field}`")
        return type(error)(message, param=field)

    def _of_client(self, field: str) -> str:
        tools = {f"tools[{index}].function": each for index, each in enumerate(self.tools or ())}
        messages = {f"messages[{index}]": each for index, each in enumerate(self.messages or ())}
        names = {
            "messages": self.prompt,
            "continue_final_message": self.continued,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop,
            "response_format": self.format,
            "tools": self.listed,
            "tool_choice": self.choice,
        }
        for path, origin in (tools | messages | names).items():
            rest = field.removeprefix(path)
            if field.startswith(path) and rest[:1] in ("", ".", "["):
                return origin if path.startswith("messages") else origin + rest
        return field


OF_CHAT = Origins()
OF_PROMPT = Origins(prompt="prompt")
