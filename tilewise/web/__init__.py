"""What our HTML pages share: the look, the switch between dark and light, and how a page becomes one file."""
