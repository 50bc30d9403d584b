"""Queue samples, place them on instances and collect the tokens that they generate.

`Scheduler` queues the samples of a batch, `Placer` gives each to an instance over a `WorkLink`, `InstanceEvents`
handles the messages of the instance, and `Scheduler` puts the sample back into the queue, or accounts for its end
and has it journaled. Everything runs on one event loop and, apart from deadlines, only in reaction to an event: a
batch, a message of an instance, a lost instance. `Turns` splits loops over many samples: between two samples the
batch may be dropped, and a sample may be placed, end or wait again.
"""
