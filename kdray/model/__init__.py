"""The networks and their text: what is read from a model folder, and how it runs.

config, checkpoint, int4, manifest, weights   from a folder to this rank's tensors
layers, rope, mla, moe, target                the target model, built of them
batch, parallel                               the rows of a step; ranks and how they add up
dflash*, drafter                              the drafter
tokenizer, chat                               text in, text out
"""
