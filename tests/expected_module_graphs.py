"""The graphs of the zoo's ready modules of brainstate and brainpy; the notation is that of
`expected_graphs.py`.
"""

from __future__ import annotations

MODULE_GRAPHS: dict[str, str] = {}

MODULE_GRAPHS["ValinaRNNCell"] = """
# h = relu([x h] W + b)
group h (2, 4)
product W.weight["weight"] -> h
bias W.weight["bias"] -> h
cut h > product W.weight > h
W.weight: traced, drops h > product W.weight > h
"""

MODULE_GRAPHS["GRUCell"] = """
# r, z = sigmoid([x h] Wrz), h = (1 - z) h + z tanh([x r h] Wh): r reaches h only through Wh, so only z is traced
group h (2, 4)
product Wrz.weight["weight"][:, 4:] -> h
bias Wrz.weight["bias"][4:] -> h
product Wh.weight["weight"] -> h
bias Wh.weight["bias"] -> h
cut h > product Wrz.weight > h
cut h, Wrz.weight > product Wh.weight > h
Wrz.weight: traced, drops h > product Wrz.weight > h; h > product Wh.weight > h; itself > product Wh.weight > h
Wh.weight: traced, drops h > product Wrz.weight > h; h > product Wh.weight > h
"""

MODULE_GRAPHS["MGUCell"] = """
# f = sigmoid([x h] Wf), h = (1 - f) h + f tanh([x f h] Wh): f is traced where it gates, lost inside Wh
group h (2, 4)
product Wf.weight["weight"] -> h
bias Wf.weight["bias"] -> h
product Wh.weight["weight"] -> h
bias Wh.weight["bias"] -> h
cut h > product Wf.weight > h
cut h, Wf.weight > product Wh.weight > h
Wf.weight: traced, drops h > product Wf.weight > h; h > product Wh.weight > h; itself > product Wh.weight > h
Wh.weight: traced, drops h > product Wf.weight > h; h > product Wh.weight > h
"""

MODULE_GRAPHS["LSTMCell"] = """
# gates i, g, f, o of [x h] W: the first three reach c and through it h, o reaches h
group h, c (2, 4)
product W.weight["weight"][:, :4] -> h, c
product W.weight["weight"][:, 4:8] -> h, c
product W.weight["weight"][:, 8:12] -> h, c
product W.weight["weight"][:, 12:] -> h
bias W.weight["bias"][:4] -> h, c
bias W.weight["bias"][4:8] -> h, c
bias W.weight["bias"][8:12] -> h, c
bias W.weight["bias"][12:] -> h
cut h > product W.weight > h, c
W.weight: traced, drops h > product W.weight > h, c
"""

MODULE_GRAPHS["linear_gru_linear"] = """
# e = x encode, the GRUCell above on e, output h readout: e enters both products of the cell
group cell.h (2, 4)
product cell.Wrz.weight["weight"][:, 4:] -> cell.h
bias cell.Wrz.weight["bias"][4:] -> cell.h
product cell.Wh.weight["weight"] -> cell.h
bias cell.Wh.weight["bias"] -> cell.h
cut cell.h, encode.weight > product cell.Wrz.weight > cell.h
cut cell.h, encode.weight, cell.Wrz.weight > product cell.Wh.weight > cell.h
encode.weight: upstream, drops itself > product cell.Wrz.weight > cell.h; itself > product cell.Wh.weight > cell.h
cell.Wrz.weight: traced, drops cell.h > product cell.Wrz.weight > cell.h; cell.h > product cell.Wh.weight > cell.h
  ; itself > product cell.Wh.weight > cell.h
cell.Wh.weight: traced, drops cell.h > product cell.Wrz.weight > cell.h; cell.h > product cell.Wh.weight > cell.h
readout.weight: direct
"""

MODULE_GRAPHS["vmapped_module"] = """
# the MGUCell above, for each row
group cell.h (2, 4)
product cell.Wf.weight["weight"] -> cell.h
bias cell.Wf.weight["bias"] -> cell.h
product cell.Wh.weight["weight"] -> cell.h
bias cell.Wh.weight["bias"] -> cell.h
cut cell.h > product cell.Wf.weight > cell.h
cut cell.h, cell.Wf.weight > product cell.Wh.weight > cell.h
cell.Wf.weight: traced, drops cell.h > product cell.Wf.weight > cell.h; cell.h > product cell.Wh.weight > cell.h
  ; itself > product cell.Wh.weight > cell.h
cell.Wh.weight: traced, drops cell.h > product cell.Wf.weight > cell.h; cell.h > product cell.Wh.weight > cell.h
"""

MODULE_GRAPHS["conv_module"] = """
# h = tanh(h/2 + x * w)
group leaky.h (2, 5, 4)
convolution conv.weight["weight"] -> leaky.h
conv.weight: traced, exact
"""

MODULE_GRAPHS["embedding_module"] = """
# h = tanh(h/2 + table[x])
group leaky.h (2, 4)
lookup table.weight -> leaky.h
table.weight: traced, exact
"""

MODULE_GRAPHS["LIF"] = """
# v = decay (v - spike(v)) + gain (x w + b)
group neuron.V (2, 4)
product linear.weight["weight"] -> neuron.V
bias linear.weight["bias"] -> neuron.V
linear.weight: traced, exact
"""

MODULE_GRAPHS["ALIF"] = """
# as LIF, and a = decay (a + spike of old v and a): the input reaches v alone
group neuron.V, neuron.a (2, 4)
product linear.weight["weight"] -> neuron.V
bias linear.weight["bias"] -> neuron.V
linear.weight: traced, exact
"""
