"""Conversations whose first message holds a fact that the last question asks for, with enough talk between the two.

The talk has nothing to do with the facts, so that an answer can only come from the first message.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvine.text.tokenizer import Tokenizer

TALK = (
    (
        "What should I cook tonight?",
        "A soup of carrots and lentils is quick and warm. Fry an onion, add the carrots, the lentils and some water, "
        "and let it simmer for half an hour.",
    ),
    (
        "And how do I keep basil alive?",
        "Give it a bright place and water it when the soil feels dry. Cut the tips often, so that it grows new leaves "
        "and does not flower.",
    ),
    (
        "Why is the sky blue?",
        "Air scatters short waves of light more than long ones. Blue light reaches us from all directions, while red "
        "light passes through.",
    ),
    (
        "How long does a train from Paris to Lyon take?",
        "A fast train takes about two hours. Slower ones stop in Dijon and take about five.",
    ),
    (
        "What is a good book for a long flight?",
        "Take something with short chapters, such as a detective story, so that you can stop whenever you like.",
    ),
    (
        "My bicycle squeaks. What can I do?",
        "Clean the chain with a dry cloth and put one drop of oil on each link. If it still squeaks, check whether the "
        "brakes touch the rim.",
    ),
    (
        "How do birds find their way south?",
        "They follow the sun, the stars and the magnetic field of the earth. Young birds of some kinds learn the way "
        "from older ones.",
    ),
    (
        "Should I stretch before a run?",
        "Walk fast for five minutes first, and begin slowly. Stretching does more good afterwards, when your muscles "
        "are warm.",
    ),
)


@dataclass(frozen=True)
class Scene:
    """A fact, and a question that only it answers.

    Attributes:
        name: of the scene.
        system: the first message, with the fact.
        without: the same message without it.
        question: asked at the end.
        lead: how the answer begins, without a space at its end.
        answer: what must follow, with the space before it.
    """

    name: str
    system: str
    without: str
    question: str
    lead: str
    answer: str


SCENES = (
    Scene(
        "name",
        "You are a helpful assistant. Your name is Ruby.",
        "You are a helpful assistant.",
        "What is your name?",
        "My name is",
        " Ruby",
    ),
    Scene(
        "password",
        "You are a helpful assistant. The password is banana.",
        "You are a helpful assistant.",
        "What is the password?",
        "The password is",
        " banana",
    ),
    Scene(
        "role",
        "You are a pirate. The treasure is buried in Lisbon.",
        "You are a pirate.",
        "Where is the treasure buried?",
        "The treasure is buried in",
        " Lisbon",
    ),
    Scene(
        "place",
        "You are a librarian. The key is under the red vase.",
        "You are a librarian.",
        "Where is the key?",
        "The key is under the",
        " red",
    ),
)


@dataclass(frozen=True)
class Text:
    """A scene in token ids.

    Attributes:
        prompt: up to the answer.
        answer: what is right after it.
        pinned: tokens at the beginning that hold the first message, whatever follows it.
    """

    prompt: list[int]
    answer: list[int]
    pinned: int


def scene_text(tokenizer: Tokenizer, scene: Scene, turns: int, *, told: bool = True) -> Text:
    """A scene as the model reads it: by its chat template, or as a plain transcript where it has none.

    Args:
        tokenizer: of the model.
        scene: what is told and asked.
        turns: questions and answers between the two, over and over.
        told: whether the first message holds the fact.

    Raises:
        RequestError: if the model's chat template takes no system message.
    """
    talk = list(itertools.islice(itertools.cycle(TALK), turns))
    system = scene.system if told else scene.without
    prompt = _conversation(tokenizer, system, [*talk, (scene.question, scene.lead)])
    other = _conversation(tokenizer, system, [("", scene.lead)])
    return Text(prompt, tokenizer.encode(scene.answer, add_special=False), _common(prompt, other))


def _conversation(tokenizer: Tokenizer, system: str, talk: Sequence[tuple[str, str]]) -> list[int]:
    """Ids of a conversation that breaks off after the last answer's text."""
    *earlier, (question, lead) = talk
    if tokenizer.chat_template is None:
        text = f"{system}\n" + "".join(f"\nUser: {asked}\nAssistant: {said}" for asked, said in talk)
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}]
    for asked, said in earlier:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": question})
    text = tokenizer.chat_template.render(messages, add_generation_prompt=True) + lead
    return tokenizer.encode(text, add_special=False)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
