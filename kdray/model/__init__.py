"""The networks and their text: what is read from a model folder, and how it runs.

config (json_fields), checkpoint, int4        what a model folder holds
manifest, weights                             what is needed of it, and this rank's part
layers, rope, mla, moe, target                the target model, built of them
batch, parallel                               the rows of a step; ranks and how they add up
dflash*, drafter                              the drafter
tokenizer, chat                               text in, text out
"""
