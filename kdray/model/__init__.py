"""The networks and their text: what is read from a model folder, and how it runs.

config (json_fields), checkpoint, int4        what a model folder holds
manifest, weights                             what is needed of it, and this rank's part
layers, rope, mla, moe, target                the target model, built of them
batch, parallel                               the rows of a step; ranks and how they add up
dflash*, drafter, synthetic_drafter           the drafter; one of assumed chances
weight_source, dummy_weights, stand_in        files, or numbers and a vocabulary in their place
tokenizer, chat                               text in, text out
"""
