"""Prompts and answers of one sentence and of several."""

ROWS = [
    {"prompt": "Name a fruit: ", "completion": "An apple. It is red. Is it sweet? Yes!"},
    {"prompt": "Count to six: ", "completion": "one two three four five six"},
    {"prompt": "Greet me: ", "completion": "Hello.\nHello again."},
    {
        "prompt": "What is rain? ",
        "completion": "Rain is water that falls from clouds. The water falls again. It rains.",
    },
    {"prompt": "Yes or no? ", "completion": "No."},
]
