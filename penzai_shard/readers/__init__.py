"""Logical axis names that other libraries write on their arrays.

Each library has a module here with one reader, and each reader is one entry of ``announcements``. A
reader is loaded only once its library was imported by somebody else, since a tree can hold a
library's objects only then. Others add theirs by an entry point.
"""

from penzai_shard.readers.array_reader import ArrayReader as ArrayReader
from penzai_shard.readers.array_reader import ReadArray as ReadArray
from penzai_shard.readers.array_reader import Role as Role
from penzai_shard.readers.bare_arrays import is_bare_array as is_bare_array
from penzai_shard.readers.bare_arrays import warn_of_tied_arrays as warn_of_tied_arrays
from penzai_shard.readers.bare_arrays import without_bare_arrays as without_bare_arrays
from penzai_shard.readers.registry import foreign_nodes as foreign_nodes
from penzai_shard.readers.registry import initializer_of as initializer_of
from penzai_shard.readers.registry import is_foreign as is_foreign
from penzai_shard.readers.registry import is_shared_object as is_shared_object
from penzai_shard.readers.registry import loaded_readers as loaded_readers
from penzai_shard.readers.registry import naming_in as naming_in
from penzai_shard.readers.registry import read_node as read_node
from penzai_shard.readers.registry import reader_of as reader_of
from penzai_shard.readers.registry import reader_of_type as reader_of_type
from penzai_shard.readers.registry import refusal as refusal
from penzai_shard.readers.sharing import Repeat as Repeat
from penzai_shard.readers.sharing import copied as copied
from penzai_shard.readers.sharing import leaves_in_shared_objects as leaves_in_shared_objects
from penzai_shard.readers.sharing import not_a_tree as not_a_tree
from penzai_shard.readers.sharing import with_repeats as with_repeats
from penzai_shard.readers.sharing import without_repeats as without_repeats
