"""Shows what other rooms found out: a page about a layout, and how an array lies over devices."""
