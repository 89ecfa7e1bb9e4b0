"""What a page says, without how it looks."""

import html
import re


def words_of(path):
    """The text of a page's body, its words parted by single spaces."""
    body = path.read_text(encoding="utf-8").partition("<body>")[2]
    # Only these two stand within words.
    body = re.sub(r'<wbr>|<span class="n">([^<]*)</span>', r"\1", body)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())
