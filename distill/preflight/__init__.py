"""Everything that can be known of a run before a model is loaded: files, tokenizers, prompts, the machine.

`folder` reads model folders, `vocabulary` compares tokenizers, `data` reads prompts. `readers` is for teachers that do
not read the student's prompts: `foreign` has those with another tokenizer, `context` what others read beside them, and
`own_prompts` spells it. `lora` is for the layers that get adapters. `memory` looks at slots and the host, `machine` at
disk and ports, `programs` at interpreters and devices, `parts` at the user's own classes. `prepare` runs a recipe's
script, and `inspection` puts all of it in order.
"""

from distill.preflight.data import Prompts
from distill.preflight.folder import ModelFolder
from distill.preflight.inspection import Models, Preflight, TeacherFolder, inspect, inspect_early
from distill.preflight.prepare import is_prepared, prepare
from distill.preflight.vocabulary import Vocabulary

__all__ = [
    "ModelFolder",
    "Models",
    "Preflight",
    "Prompts",
    "TeacherFolder",
    "Vocabulary",
    "inspect",
    "inspect_early",
    "is_prepared",
    "prepare",
]
