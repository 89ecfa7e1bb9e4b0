"""Arrays that are stored padded on the devices of two processes."""

from tests.processes import jobs


def test_each_process_has_its_parts_of_what_is_stored_padded(tmp_path):
    for found in jobs.run("padding_programs.claims", [str(tmp_path)]):
        shown = found.pop("shown")
        assert "in:5, out:7" in shown
        assert "stored padded" in shown
        assert found == dict.fromkeys(
            [
                "placed",
                "arrays of JAX",
                "moved",
                "initialised",
                "restored",
                "loaded",
                "trained",
                "its momenta",
                "its state",
            ],
            4,
        )
