"""Prompts with images and the like, as the engine takes them: with a token id for every row of an image."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from midstream.core.errors import PromptError
from midstream.core.prompts import PreparedPrompt

from .engine import Engine, refusals
from .jobs import Rendered


def rendered(engine: Engine, prompts: Sequence[PreparedPrompt]) -> tuple[list[PreparedPrompt], list[Rendered | None]]:
    """Prompts with their images' placeholders in place, and what the engine takes for those that have any.

    A prompt holds one placeholder for each image, as its model's template writes it. PromptError in vLLM's words.
    """
    made: list[PreparedPrompt] = []
    inputs: list[Rendered | None] = []
    for index, prompt in enumerate(prompts):
        if not prompt.multi_modal_data:
            made.append(prompt)
            inputs.append(None)
            continue
        asked = {"prompt_token_ids": list(prompt.token_ids), "multi_modal_data": dict(prompt.multi_modal_data)}
        try:
            found = _render(engine.llm.llm_engine, asked)
        except (*refusals(), RuntimeError, KeyError, AssertionError) as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise PromptError(f"prompt {index}: vLLM refuses its multi_modal_data: {said[0]:.200}") from error
        made.append(replace(prompt, token_ids=tuple(found["prompt_token_ids"])))
        inputs.append(Rendered(found))
    return made, inputs


def _render(llm_engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    (found,) = llm_engine.renderer.render_cmpl([parse_model_prompt(llm_engine.model_config, asked)])
    return dict(found)
