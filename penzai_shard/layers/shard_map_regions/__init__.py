"""Running a layer per device under ``jax.shard_map``, if that computes what the layer computes.

A call goes through four steps (``region_call``):

1. plan: what each array is split over (``region_plan``), by names that do not cross the boundary
   themselves (``boundaries``);
2. trace: the layer's program, with the whole lengths and with those of one device's part;
3. check (``region_check``): both programs are walked through in step (``side_by_side``) and
   followed operation by operation (``following``), by a rule for each
   (``primitive_rules``, ``indexing_rules``, ``control_flow``, ``derivatives``); what is known of a
   value on the way is a ``split_values.Flow``;
4. call: parameters are gathered, the program runs, and each device hands out its part.
"""
