"""The parts of other libraries that may change without notice, each in modules of one library.

A name that is private, experimental or outside what a library documents as stable is used in this
package alone. ``tests/test_library_apis.py`` holds one test per assumption about them, and refuses
their use anywhere else; so a new release of a library fails in one place that names the cause.
"""
