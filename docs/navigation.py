"""Which pages there are, in the order of the site's menu. A test checks that none is missing."""

NAVIGATION = {
    "Tutorial": (
        "tutorial/1-softmax",
        "tutorial/2-online-softmax",
        "tutorial/3-tiles",
        "tutorial/4-skipping",
        "tutorial/5-gpu-kernel",
        "tutorial/6-warp-specialised",
    ),
    "Use": ("install", "tour", "cookbook", "commands", "linear", "backends", "support", "contract", "judge", "cache"),
    "Learn by doing": ("lab", "explain", "simulator"),
    "Inside": ("design", "extending", "memory", "accuracy", "performance", "scaling", "report"),
}
