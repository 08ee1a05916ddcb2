"""Scripts for the scripted engine: what the model says in the tests of the examples."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Messages = Sequence[dict[str, str]]


def sums(messages: Messages, index: int) -> str:
    """Every third answer is wrong."""
    a, b = map(int, re.findall(r"(\d+) \+ (\d+)", messages[-1]["content"])[-1])
    return str(a + b + (index % 3 == 2))


def computes(messages: Messages, index: int) -> str:
    """Uses the python tool for a product, then says what it printed; every third time it trusts its own head."""
    question = next(m["content"] for m in messages if m["role"] == "user" and " times " in m["content"])
    a, b = re.findall(r"(\d+) times (\d+)", question)[-1]
    if messages[-1]["content"] == question or question in messages[-1]["content"]:
        if index % 3 == 2:
            return "Answer: 1"
        call = {"name": "python", "arguments": {"program": f"print({a} * {b})"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    printed = re.findall(r"-?\d+", messages[-1]["content"])
    return f"That gives it.\nAnswer: ${printed[-1]}$"


def polite_by_halves(messages: Messages, index: int) -> str:
    """Polite, and about the customer's matter, in every second answer."""
    matter = max(messages[-1]["content"].rpartition(":")[2].strip(" .!?").split(), key=len)
    return f"We are sorry about the {matter} and send another one." if index % 2 else "No."


def cocktail(messages: Messages, index: int) -> str:
    """Sums as above; any other question gets one word, every second time."""
    if " + " in messages[-1]["content"]:
        return sums(messages, index)
    return "word" if index % 2 else "two words"


def errands(messages: Messages, index: int) -> str:
    """Looks around first, then does the errand; every third time it says it is done without doing it."""
    told = next(m["content"] for m in messages if re.search(r"from my wallet|ill on|newest mail", m["content"]))
    if len([m for m in messages if m["role"] == "assistant"]) == 0:
        return "Let me see.\n```python\nprint(apis.contacts.search(name=''))\n```"
    done = "apis.supervisor.complete_task()"
    if index % 3 == 2:
        return f"```python\n{done}\n```"
    if found := re.search(r"Send (\d+) to ([\w ]+) from", told):
        work = f"p = apis.contacts.search(name={found[2]!r})[0]\napis.wallet.send(email=p['email'], amount={found[1]})"
    elif found := re.search(r"ill on (\w+)", told):
        work = f"for e in apis.calendar.list(day={found[1]!r}):\n  apis.calendar.delete(event_id=e['event_id'])"
    elif found := re.search(r"mail from ([\w ]+) with exactly '(\w+)'", told):
        work = (
            f"p = apis.contacts.search(name={found[1]!r})[0]\nm = apis.mail.list(sender=p['email'])[0]\n"
            f"apis.mail.reply(mail_id=m['mail_id'], text={found[2]!r})"
        )
    else:
        raise ValueError(told)
    return f"```python\n{work}\n{done}\n```"


def picks_an_option(messages: Messages, index: int) -> str:
    """One of the options it is given, another one each time; a sentence where there are none."""
    options = re.findall(r"one of: (.*)\.", messages[-1]["content"])
    if not options:
        return "I trust nobody yet."
    names = options[-1].split(", ")
    return names[index % len(names)]


GOOD = {
    "river": (
        "本文研究泥沙输移如何改变河流三角洲的形态。利用数字高程模型（DEM），估算了四十年间的侵蚀量。"
        "结果表明，水坝是造成土地损失的主要原因。"
    ),
    "galaxy": (
        "本文报告了十二个星系的红移。根据光谱能量分布（SED），推导出它们的恒星形成率。"
        "结果表明，尘埃遮挡了一半的年轻恒星。"
    ),
}
PLAIN = {
    "river": (
        "我们研究沉淀运输怎样改变河流三角洲的形状。我们用DEM估计了四十年的腐蚀。我们的结果说明水坝解释了大部分损失。"
    ),
    "galaxy": "我们报告了十二个星系的红移。我们用SED得到它们的造星速度。我们的结论是灰尘挡住了一半的年轻恒星。",
}
REVIEWS = {
    "river": "sediment transport: 泥沙输移\nerosion: 侵蚀",
    "galaxy": "star formation rate: 恒星形成率\ndust: 尘埃",
}


def translates(messages: Messages, index: int) -> str:
    """A plain draft, a right review, and a final text that is good two times of three."""
    prompt = messages[-1]["content"]
    name = "river" if "river" in prompt else "galaxy"
    if prompt.startswith("Check the terminology"):
        return REVIEWS[name] if index % 2 else "looks fine"
    if prompt.startswith("Translate"):
        return PLAIN[name]
    return PLAIN[name] if index % 3 == 0 else GOOD[name]
