"""What training prompts are about: the first words of requests, for the model to go on from.

Nothing here but data. A line names a topic and its openings, between bars; a line that is set in
goes on with the one before; `\\n` is a new line. `{subject}`, `{person}`, `{code}` and `{tongue}`
are filled in by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ABOUT_TEXT", "BEGINNINGS", "FILLINGS", "FOLLOW_UPS", "TOPICS", "Topic"]


@dataclass(frozen=True, slots=True)
class Topic:
    """A kind of request."""

    name: str
    openings: tuple[str, ...]


def _read(text: str) -> tuple[Topic, ...]:
    """Read topics as they are written below."""
    joined = text.replace("\n    ", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    pairs = [line.split(":", 1) for line in lines]
    return tuple(
        Topic(name, tuple(each.strip().replace("\\n", "\n") for each in openings.split(" | ")))
        for name, openings in pairs
    )


# Requests that the model goes on with.
TOPICS = _read(r"""
# Code.
function: Write a {code} function that | Write a {code} function to | In {code}, how do I
class: Write a {code} class | Create a {code} class that | Design a class for
script: Write a {code} script that | I need a shell script that | Write a program in {code} that
algorithm: Implement an algorithm that | Write a {code} program that finds |
    Explain how the algorithm for
sql: Write an SQL query that | Given a table of | Write a SQL query to find |
    Create a table in SQL for
web: Write an HTML page with | Write a CSS rule that | Create a simple web page for |
    Write a React component that
regex: Write a regular expression that | What does the regular expression
debugging: Why does this {code} code give an error?\n\n``` |
    Fix the bug in this {code} function:\n\n``` | I get the error
code explanation: Explain what this {code} code does:\n\n``` | What does the {code} keyword
tests: Write unit tests for a function that | Write a test in {code} for
data analysis: Using pandas, how can I | I have a CSV file with | Write {code} code to plot
command line: What is the Linux command to | How do I use git to | Explain the command
system design: Design a system that | How would you store | What database should I use for
# Numbers.
word problem: A train leaves | Tom has | Maria buys | A baker sells | If a box holds | There are |
    A farmer has
arithmetic: What is | Calculate | Compute the sum of
algebra: Solve the equation | Find the value of x if | Simplify the expression
geometry: A rectangle has | Find the area of | What is the volume of
percentages: A shirt costs | What percentage of | If the price of {subject}
probability: A bag contains | What is the probability of | Two dice are
units: Convert | How many minutes are in | How far is
logic: If all | Three friends are | Solve this riddle:
# Texts that the model is to write.
story: Write a short story about {subject} | Tell me a story about {person} who |
    Write the first paragraph of a story in which
poem: Write a poem about {subject} | Write a haiku about | Write a short poem for
letter: Write a letter to {person} | Write a formal letter to | Help me write a letter in which
email: Write an email to {person} | Draft a polite email | Write a short email asking
dialogue: Write a dialogue between {person} and | Write a conversation between {person} and |
    Write a scene in which {person}
speech: Write a short speech about {subject} | Write a toast for
essay: Write an essay about {subject} | Write an argument for |
    Discuss the advantages and disadvantages of
blog: Write a blog post about {subject} | Write the introduction of an article about
news: Write a news report about {subject} | Write a headline for
product: Write a product description for | Write an advertisement for {subject} | Write a review of
social media: Write a tweet about {subject} | Write a post for social media about
report: Write a short report on {subject} | Write minutes of a meeting about {subject}
recipe: Give me a recipe for | How do I cook | What can I cook with
names: Suggest five names for | Think of a title for a book about {subject} |
    Give me ideas for a slogan for
# Knowledge.
definition: What is {subject} | What does the word | Define | What is meant by
explanation: Explain how | Explain {subject} to a child | Explain the concept of | Explain why
comparison: What is the difference between | Compare | Which is better,
history: When did | What caused the | Who was | Describe the history of {subject}
science: How does | Why is the | What happens when | How do scientists
biology: What is the role of | How do plants | How does the human body | Describe the life of
physics: What is the law of | How does energy | Why does light
chemistry: What is the chemical | Why do metals | What happens when water
geography: What is the capital of | Describe the climate of | Which countries | Name three rivers
health: What are the symptoms of | How can I sleep | Is it healthy to | What are the benefits of
economics: What is inflation | How do banks | Explain supply and demand | Why do prices
law and society: What are the rights of | How does a government | What is the purpose of
books and films: Who wrote | What is the plot of | Describe the main character of
music and art: Describe the style of | What instruments | Who painted
sport: What are the rules of | How do I train for | Who won
computers: What is a computer | How does the internet | What is the difference between RAM |
    How do I protect
machine learning: What is a neural network | Explain the difference between supervised |
    How do I train a model to
# Advice.
how to: How do I | How can I | What is the best way to | Give me step-by-step instructions to
advice: I have a problem with | I am worried about | Should I | What should I do if
planning: Make a plan for | Plan a weekend in | Create a weekly schedule for | Help me organise
travel: What should I see in | Recommend a place | I am travelling to
work: How do I prepare for | Write a job description for | What skills does {person} need
learning: How can I learn | Create a quiz about {subject} | Make flash cards about | Teach me
# Structure.
list: List five | List three reasons why | Give me ten examples of | Name the main parts of |
    Make a list of
table: Make a table of | Create a table that compares | Show in a table
json: Give me a JSON object with | Write a JSON object that describes {subject} |
    Return a JSON list of | Create a JSON schema for
yaml and config: Write a YAML file for | Write a configuration file for | Write a Dockerfile for
csv: Create a CSV file with | Write five rows of data about {subject}
outline: Write an outline for | Make a table of contents for a book about {subject}
multiple choice: Which of the following | Choose the right answer: | Is it true that
# Given texts, which the model makes up.
extraction: Extract the names and dates from this text:\n\nOn |
    List all numbers in this text:\n\nThe | Find the email address in this text:\n\nDear
classification: Classify the sentiment of this review as positive or negative:\n\nI |
    Is this sentence formal or informal?\n\n |
    To which category does this text belong: sport, politics or science?\n\nThe
passage question: Read the text and answer the question.\n\nText: The |
    Here is a text:\n\nThe history of {subject} |
    Answer the question with the help of this text.\n\nText: In
summary: Summarize this text:\n\nThe | Summarize this text in one sentence:\n\nIn recent years, |
    Give the main points of this article about {subject}:\n\n
rewriting: Rewrite this sentence in a more formal way: | Make this sentence shorter: |
    Rewrite this text for children:\n\nThe
grammar: Correct the grammar of this sentence: | Correct the mistakes in this text:\n\nYesterday I |
    Put this sentence into the past tense:
translation: Translate this sentence into {tongue}: | How do you say in {tongue} |
    Translate into English:
words: Give me synonyms for | Use the word | What is the opposite of |
    Write a sentence with the word
# Conversation.
small talk: Hello, | Hi, I | Good morning! | Thank you for | How are you | Can you
role play: You are {person}. | Pretend to be {person} | Act as a
opinion: What do you think about {subject} | Do you like | Do you agree that
about the model: Who are you | What can you do | Do you have
# Other languages.
german: Erkläre mir | Schreibe einen kurzen Text über | Was ist | Wie kann ich
french: Explique-moi | Écris un court texte sur | Qu'est-ce que | Comment puis-je
spanish: Explica | Escribe un texto corto sobre | ¿Qué es | ¿Cómo puedo
italian: Spiegami | Scrivi un breve testo su | Che cos'è
portuguese: Explique | Escreva um texto curto sobre | O que é
chinese: 请解释 | 写一篇关于 | 什么是
""")

# Requests about a text that stands below them: an answer that the model gave before.
ABOUT_TEXT = _read(r"""
summarize: Summarize this text in two sentences. | Give the main points of this text as a list. |
    What is this text about? | Summarize the following text.
rephrase: Rewrite this text in simpler words. | Rewrite the following text in a friendly tone. |
    Make this text shorter. | Rewrite this text in a formal style.
continue: Continue this text. | Write one more paragraph for this text.
ask: Write three questions about this text. | What is the most important sentence of this text? |
    Is the following text correct?
extract: List the important words of this text. |
    Extract the main facts of this text as a JSON object. | Find a good title for this text.
render: Translate this text into {tongue}. | Turn this text into an email. |
    Turn this text into a list of bullet points.
correct: Correct the spelling in this text and return the whole text. |
    Correct the mistakes in the following text.
repeat: Repeat this text word for word. |
    Copy this text and make the first letter of each sentence bold.
""")

# What a person says to go on after an answer.
FOLLOW_UPS = _read(r"""
shorter: Make it shorter. | Can you say that in one sentence? | Please summarize your answer.
longer: Tell me more. | Can you explain that in more detail? | Please go on. | Give me an example.
simpler: I don't understand. Explain it more simply. | Explain it as you would to a child.
change: Rewrite it in a more formal style. | Give me another version. | Write it as a list. |
    Change the names.
doubt: Are you sure? | Is that correct? Check it again. | Why? | What is wrong with your answer?
next: What should I do next? | What are the advantages and disadvantages? |
    Thank you. And what about the opposite?
as data: Give me that as a JSON object. | Make a table of it.
""")

# For models without a chat template: how texts begin.
BEGINNINGS = _read(r"""
prose: The history of {subject} | It was a cold morning when | Once upon a time, | {subject} is
news: On Monday, the government | Scientists have found | A new study about {subject}
code: def | import | class | #include < | function | public class | SELECT
maths: Question: | Theorem. Let | Tom has | To solve the equation
markup: # {subject}\n\n | ## Introduction\n\n | <html>\n | {\n  " | <table>
how to: How to | Step 1: | In this tutorial, you will learn
dialogue: "Where have you been?" asked | Q: | User:
letter: Dear {person}, | To whom it may concern, | Hi all,
knowledge: In physics, | The capital of | A cell is | The law of
languages: Die Geschichte der | L'histoire de | La historia de | La storia di
""")

# What stands for a name in braces.
_FILLINGS = _read(r"""
subject:
    a bicycle | a garden | the moon | coffee | a small bakery | bees | a train journey | volcanoes
    | a library | the ocean | solar panels | a football club | rice | bridges | a hospital |
    dinosaurs | the human heart | a farm | electric cars | chess | money | the Roman Empire | a
    museum | penguins | photography | a school trip | bread | climate change | a mobile phone |
    sleep | a marathon | gravity | a rainforest | the internet | a wedding | paper | vaccines | a
    lighthouse | tea | earthquakes | an old clock | online shopping | wolves | a music festival |
    plastic waste | a desert | a job interview | the French Revolution | robots | a birthday party
    | rivers | birds | a hotel | the stock market | glass | a kitchen | databases | public
    transport | a mountain hike | noise in cities | recycling | a power station | a theatre |
    mushrooms
person:
    a teacher | my landlord | a nurse | two friends | a doctor and a patient | a farmer | my
    manager | a customer | a young programmer | a grandmother | a new neighbour | a chef | a police
    officer | a scientist | a student | a bus driver | my team | a shop owner | a mother and her
    son | a travel agent | an engineer | a journalist | a piano teacher
code:
    Python | Python | Python | Python | JavaScript | JavaScript | TypeScript | Java | C | C++ | C#
    | Go | Rust | Ruby | PHP | Swift | Kotlin | Bash | R | SQL
tongue:
    French | Spanish | German | Italian | Portuguese | Dutch | Polish | Swedish | Russian | Turkish
    | Chinese | Japanese | Korean | Arabic | Hindi | Latin
""")
FILLINGS: Mapping[str, tuple[str, ...]] = {each.name: each.openings for each in _FILLINGS}
