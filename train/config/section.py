"""What a section of a configuration is."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from train.config import values


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class NamedSection(Section):
    """A section whose `name` decides which other arguments there are. They are kept as they are read, in `arguments`;
    the room that owns the name checks them."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _read_arguments(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value if key in cls.model_fields else values.free(value) for key, value in given.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
