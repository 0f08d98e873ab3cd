"""What an engine reserves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineConfig(BaseModel):
    """Sizes of an engine.

    Raises:
        pydantic.ValidationError: a value is out of range or contradicts another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_pages: int = Field(ge=1, description="pages of the KV cache that requests may hold")
    page_size: int = Field(default=16, ge=1, description="tokens a KV page holds")
    max_batch_size: int = Field(default=64, ge=1, description="sequences that run at once")
    max_num_tokens: int = Field(default=2048, ge=2, description="tokens of a step: all decodes, and chunks of prompts")
    max_seq_len: int = Field(default=8192, ge=2, description="tokens of a sequence, prompt and generation together")

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.max_num_tokens <= self.max_batch_size:
            raise ValueError(
                f"max_num_tokens={self.max_num_tokens} must exceed max_batch_size={self.max_batch_size}: prompts get "
                "what decodes leave of a step"
            )
        return self
