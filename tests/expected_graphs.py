"""The graph that each model of the zoo must compile to, written by hand from the model's equations.

Read it beside `models.py`. One line each: a hidden group with its states and shape (`x 2`: two states packed in one); a
relation (`primitive(x, how the view is made(its parameters)) output shape as key -> groups: states it feeds`); a cut
(`what arrives > what stands there > the states behind it`); a parameter's certificate; any other decision.
"""

from __future__ import annotations

EXPECTED: dict[str, str] = {}

EXPECTED["rnn"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
dot_general(x, u) (2, 4) as weight -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
cut: h > product with `u` > h
w: traced, drops h > dot_general > h
u: traced, drops h > dot_general > h
b: traced, drops h > dot_general > h
"""

EXPECTED["transposed"] = """
group 0: h (2, 4)
dot_general(x, transpose(w)) (2, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["sliced"] = """
group 0: h (2, 4)
dot_general(x, split(w)) (2, 4) as weight -> 0: h
dot_general(x, split(w)) (2, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["torch_gru"] = """
group 0: h (2, 4)
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h
broadcast_in_dim(split(b_ih)) (2, 4) as bias -> 0: h
broadcast_in_dim(split(b_ih)) (2, 4) as bias -> 0: h
broadcast_in_dim(split(b_ih)) (2, 4) as bias -> 0: h
broadcast_in_dim(split(b_hh)) (2, 4) as bias -> 0: h
broadcast_in_dim(split(b_hh)) (2, 4) as bias -> 0: h
broadcast_in_dim(split(b_hh)) (2, 4) as bias -> 0: h
cut: h > product with `w_hh` > h
w_ih: traced, drops h > dot_general > h
w_hh: traced, drops h > dot_general > h
b_ih: traced, drops h > dot_general > h
b_hh: traced, drops h > dot_general > h
"""

EXPECTED["torch_lstm"] = """
group 0: h, c (2, 4)
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h, c
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h, c
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h, c
dot_general(x, transpose(w_ih)) (2, 4) as weight -> 0: h
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h, c
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h, c
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h, c
dot_general(x, transpose(w_hh)) (2, 4) as weight -> 0: h
broadcast_in_dim(split(b)) (2, 4) as bias -> 0: h, c
broadcast_in_dim(split(b)) (2, 4) as bias -> 0: h, c
broadcast_in_dim(split(b)) (2, 4) as bias -> 0: h, c
broadcast_in_dim(split(b)) (2, 4) as bias -> 0: h
cut: h > product with `w_hh` > h, c
w_ih: traced, drops h > dot_general > c, h > dot_general > h
w_hh: traced, drops h > dot_general > c, h > dot_general > h
b: traced, drops h > dot_general > c, h > dot_general > h
"""

EXPECTED["concatenated"] = """
group 0: h (2, 4)
dot_general(x, concatenate(w1, w2)) (2, 4) as weight/weight_1 -> 0: h
w1: traced, exact
w2: traced, exact
"""

EXPECTED["masked"] = """
group 0: h (2, 4)
dot_general(x, mul(w)) (2, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["tied_twice"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["tied_layers"] = """
group 0: h1 (2, 4)
group 1: h2 (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h1
dot_general(x, w) (2, 4) as weight -> 1: h2
cut: h1, w > product with `w` > h2
w: traced, drops h1 > dot_general > h2, w > dot_general > h2
"""

EXPECTED["summed"] = """
group 0: h (2, 4)
dot_general(x, add(w1, w2)) (2, 4) as weight/weight_1 -> 0: h
w1: traced, exact
w2: traced, exact
"""

EXPECTED["low_rank"] = """
group 0: h (2, 4)
dot_general(x, dot_general(a, b)) (2, 4) as weight/weight_1 -> 0: h
a: traced, exact
b: traced, exact
"""

EXPECTED["normalised"] = """
group 0: h (2, 4)
dot_general(x, broadcast_in_dim > mul > integer_pow > reduce_sum > sqrt > broadcast_in_dim > div(v, g)) (2, 4) as weight/weight_1 -> 0: h
v: traced, exact
g: traced, exact
"""

EXPECTED["pytree"] = """
group 0: h (2, 4)
dot_general(x, p) (2, 4) as weight -> 0: h
broadcast_in_dim(p) (2, 4) as bias -> 0: h
p: traced, exact
"""

EXPECTED["matvec"] = """
group 0: h (4,)
dot_general(x, w) (4,) as weight -> 0: h
w: traced, exact
"""

EXPECTED["vecmat"] = """
group 0: h (4,)
dot_general(x, w) (4,) as weight -> 0: h
w: traced, exact
"""

EXPECTED["einsum_axes"] = """
group 0: h (2, 4, 2)
dot_general(x, w) (2, 4, 2) as weight -> 0: h
w: traced, exact
"""

EXPECTED["grouped_product"] = """
group 0: h (2, 2, 4)
dot_general(x, w) (2, 4, 2) as weight -> 0: h
w: traced, exact
"""

EXPECTED["feature_major"] = """
group 0: h (4, 2)
dot_general(x, w) (4, 2) as weight -> 0: h
w: traced, exact
"""

EXPECTED["conv1d"] = """
group 0: h (2, 5, 4)
conv_general_dilated(x, w) (2, 5, 4) as weight -> 0: h
broadcast_in_dim(b) (2, 5, 4) as bias -> 0: h
w: traced, exact
b: traced, exact
"""

EXPECTED["conv2d"] = """
group 0: h (2, 3, 4, 4)
conv_general_dilated(x, w) (2, 3, 4, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["conv_grouped"] = """
group 0: h (2, 5, 4)
conv_general_dilated(x, w) (2, 5, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["conv_strided"] = """
group 0: h (2, 3, 4)
conv_general_dilated(x, w) (2, 3, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["conv_dilated"] = """
group 0: h (2, 6, 4)
conv_general_dilated(x, w) (2, 6, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["conv_recurrent"] = """
group 0: h (2, 5, 4)
conv_general_dilated(x, w) (2, 5, 4) as weight -> 0: h
conv_general_dilated(x, u) (2, 5, 4) as weight -> 0: h
cut: h > product with `u` > h
w: traced, drops h > conv_general_dilated > h
u: traced, drops h > conv_general_dilated > h
"""

EXPECTED["embedding"] = """
group 0: h (2, 4)
gather(x, w) (2, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["embedding_one"] = """
group 0: h (4,)
dynamic_slice(x, w) (1, 4) as weight -> 0: h
w: traced, exact
"""

EXPECTED["decay_scalar"] = """
group 0: h (2, 4)
broadcast_in_dim(logistic(a)) (2, 4) as weight -> 0: h
a: traced, exact
"""

EXPECTED["decay_vector"] = """
group 0: h (2, 4)
broadcast_in_dim(exp > neg > exp(a)) (2, 4) as weight -> 0: h
broadcast_in_dim(exp > neg > exp > sub > mul(a, gain)) (2, 4) as weight/weight_1 -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
a: traced, exact
gain: traced, exact
b: traced, exact
"""

EXPECTED["threshold"] = """
group 0: v (2, 4)
broadcast_in_dim(b) (2, 4) as bias -> 0: v
broadcast_in_dim(threshold) (2, 4) as weight -> 0: v
broadcast_in_dim(threshold) (2, 4) as weight -> 0: v
threshold: traced, exact
b: traced, exact
"""

EXPECTED["scalar_gate"] = """
group 0: h (2, 4)
dot_general(x, gate) (2, 4) as weight -> 0: h
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
gate: traced, exact
"""

EXPECTED["unknown_contact"] = """
group 0: h (2, 4)
cut: w > `custom_linear_solve` joins a weight with data in no known way > h
cut: w > `custom_linear_solve` joins a weight with data in no known way > h
cut: u > `cumsum` mixes positions > h
w: upstream, drops w > custom_linear_solve > h, w > custom_linear_solve > h
u: upstream, drops u > cumsum > h
note: unknown_contact w
"""

EXPECTED["feeds_two_ways"] = """
group 0: h (2, 4)
cut: w > one value of `dot_general` feeds many positions > h
w: upstream, drops w > dot_general > h
"""

EXPECTED["alif"] = """
group 0: v, i, a (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: v, i, a
w: traced, exact
"""

EXPECTED["five_states"] = """
group 0: a, b, c, d, e (2, 4)
broadcast_in_dim(tau) (2, 4) as weight -> 0: a, b, e
dot_general(x, w) (2, 4) as weight -> 0: a, b, e
w: traced, exact
tau: traced, exact
"""

EXPECTED["group_state"] = """
group 0: h (2, 4) x 3
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
note: state_packed h
"""

EXPECTED["two_shapes"] = """
group 0: h (2, 4)
group 1: k (2, 6)
dot_general(x, w) (2, 4) as weight -> 0: h
dot_general(x, u) (2, 6) as weight -> 1: k
dot_general(x, mix) (2, 6) as weight -> 1: k
cut: h, w > product with `mix` > k
w: traced, drops h > dot_general > k, w > dot_general > k
u: traced, exact
mix: traced, exact
"""

EXPECTED["three_in_one"] = """
group 0: h, n (2, 4)
group 1: c (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
note: state_unused c
"""

EXPECTED["stacked"] = """
group 0: h1 (2, 4)
group 1: h2 (2, 4)
dot_general(x, w1) (2, 4) as weight -> 0: h1
dot_general(x, u1) (2, 4) as weight -> 0: h1
dot_general(x, w2) (2, 4) as weight -> 1: h2
dot_general(x, u2) (2, 4) as weight -> 1: h2
cut: h1 > product with `u1` > h1
cut: w1, u1 > product with `w2` > h2
cut: h2 > product with `u2` > h2
w1: traced, drops h1 > dot_general > h1, w1 > dot_general > h2
u1: traced, drops h1 > dot_general > h1, u1 > dot_general > h2
w2: traced, drops h2 > dot_general > h2
u2: traced, drops h2 > dot_general > h2
"""

EXPECTED["skip_joined"] = """
group 0: h1, h2 (2, 4)
dot_general(x, w1) (2, 4) as weight -> 0: h1, h2
dot_general(x, w2) (2, 4) as weight -> 0: h2
w1: traced, exact
w2: traced, exact
"""

EXPECTED["unused_state"] = """
group 0: h (2, 4)
group 1: idle (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
spare: unused, exact
note: state_unused idle
"""

EXPECTED["only_written"] = """
group 0: h (2, 4)
group 1: last (2, 4)
group 2: count (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
note: state_only_written last
note: state_unused count
"""

EXPECTED["two_groups_one_weight"] = """
group 0: h1 (2, 4)
group 1: h2 (2, 4)
dot_general(x, w) (2, 4) as weight -> 0, 1: h1, h2
w: traced, exact
"""

EXPECTED["lstm_unbatched"] = """
group 0: h, c (4,)
dot_general(x, w) (4,) as weight -> 0: h, c
dot_general(x, w) (4,) as weight -> 0: h, c
dot_general(x, w) (4,) as weight -> 0: h, c
dot_general(x, w) (4,) as weight -> 0: h
cut: h > product with `w` > h, c
w: traced, drops h > dot_general > c, h > dot_general > h
"""

EXPECTED["vmapped"] = """
group 0: h (2, 4)
dot_general(x, w) (4, 2) as weight -> 0: h
broadcast_in_dim(u) (2, 4) as weight -> 0: h
w: traced, exact
u: traced, exact
"""

EXPECTED["layer_norm"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
broadcast_in_dim(g) (2, 4) as weight -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
cut: h, w > `reduce_sum` mixes positions > h
cut: h, w > `reduce_sum` mixes positions > h
w: traced, drops h > reduce_sum > h, w > reduce_sum > h, h > reduce_sum > h, w > reduce_sum > h
g: traced, drops h > reduce_sum > h, h > reduce_sum > h
b: traced, drops h > reduce_sum > h, h > reduce_sum > h
"""

EXPECTED["softmax"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
cut: h > `reduce_sum` mixes positions > h
w: traced, drops h > reduce_sum > h
"""

EXPECTED["rolled"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
cut: h > `split` moves positions > h
w: traced, drops h > split > h
"""

EXPECTED["max_pool"] = """
group 0: h (2, 6)
dot_general(x, w) (2, 6) as weight -> 0: h
cut: h > `reduce_window_max` mixes positions > h
w: traced, drops h > reduce_window_max > h
"""

EXPECTED["sorted_state"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
cut: h > `sort` mixes positions > h
w: traced, drops h > sort > h
"""

EXPECTED["mean_field"] = """
group 0: h (2, 4)
broadcast_in_dim(u) (2, 4) as weight -> 0: h
dot_general(x, w) (2, 4) as weight -> 0: h
cut: h > `reduce_sum` mixes positions > h
w: traced, drops h > reduce_sum > h
u: traced, drops h > reduce_sum > h
"""

EXPECTED["encoder_readout"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
cut: w_in, b_in > product with `w` > h
w_in: upstream, drops w_in > dot_general > h
b_in: upstream, drops b_in > dot_general > h
w: traced, exact
w_out: direct, exact
b_out: direct, exact
"""

EXPECTED["reads_old_state"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
w_out: direct, exact
"""

EXPECTED["carried_elsewhere"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, drops h > state > slow, w > state > slow
"""

EXPECTED["packed_concat"] = """
group 0: hc (2, 4) x 2
dot_general(x, w) (2, 4) as weight -> 0: hc
dot_general(x, w) (2, 4) as weight -> 0: hc
w: traced, exact
note: state_packed hc
"""

EXPECTED["packed_stack"] = """
group 0: hc (2, 4) x 2
dot_general(x, w) (2, 4) as weight -> 0: hc
w: traced, exact
note: state_packed hc
"""

EXPECTED["leading_axis"] = """
group 0: h (1, 2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
w_out: direct, exact
"""

EXPECTED["transposed_alias"] = """
group 0: h (4, 2)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
w_out: direct, exact
"""

EXPECTED["sliced_alias"] = """
group 0: h (2, 8)
dot_general(x, w) (2, 8) as weight -> 0: h
w: traced, exact
w_out: direct, exact
"""

EXPECTED["jitted"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
dot_general(x, u) (2, 4) as weight -> 0: h
cut: h > product with `u` > h
w: traced, drops h > dot_general > h
u: traced, drops h > dot_general > h
"""

EXPECTED["cond"] = """
group 0: h (2, 4)
dot_general(x, w2) (2, 4) as weight -> 0: h
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
w2: traced, exact
note: cond_converted
"""

EXPECTED["switch"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
broadcast_in_dim(b) (2, 4) as weight -> 0: h
w: traced, exact
b: traced, exact
note: cond_converted
"""

EXPECTED["short_scan"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
broadcast_in_dim(b) (2, 4) as bias -> 0: h
w: traced, exact
b: traced, exact
note: scan_unrolled
"""

EXPECTED["long_scan"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
note: scan_opaque
"""

EXPECTED["while_loop"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
w: traced, exact
note: while_opaque
"""

EXPECTED["spiking_jvp"] = """
group 0: v (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: v
dot_general(x, u) (2, 4) as weight -> 0: v
cut: v > product with `u` > v
w: traced, drops v > dot_general > v
u: traced, drops v > dot_general > v
"""

EXPECTED["spiking_vjp"] = """
group 0: v (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: v
w: traced, exact
"""

EXPECTED["ValinaRNNCell"] = """
group 0: h (2, 4)
dot_general(x, W.weight) (2, 4) as weight -> 0: h
broadcast_in_dim(W.weight) (2, 4) as bias -> 0: h
cut: h > product with `W.weight` > h
W.weight: traced, drops h > dot_general > h
"""

EXPECTED["GRUCell"] = """
group 0: h (2, 4)
dot_general(x, Wrz.weight) (2, 4) as weight -> 0: h
broadcast_in_dim(split(Wrz.weight)) (2, 4) as bias -> 0: h
dot_general(x, Wh.weight) (2, 4) as weight -> 0: h
broadcast_in_dim(Wh.weight) (2, 4) as bias -> 0: h
cut: h > product with `Wrz.weight` > h
cut: h, Wrz.weight > product with `Wh.weight` > h
Wrz.weight: traced, drops h > dot_general > h, Wrz.weight > dot_general > h, h > dot_general > h
Wh.weight: traced, drops h > dot_general > h, h > dot_general > h
"""

EXPECTED["MGUCell"] = """
group 0: h (2, 4)
dot_general(x, Wf.weight) (2, 4) as weight -> 0: h
broadcast_in_dim(Wf.weight) (2, 4) as bias -> 0: h
dot_general(x, Wh.weight) (2, 4) as weight -> 0: h
broadcast_in_dim(Wh.weight) (2, 4) as bias -> 0: h
cut: h > product with `Wf.weight` > h
cut: h, Wf.weight > product with `Wh.weight` > h
Wf.weight: traced, drops h > dot_general > h, Wf.weight > dot_general > h, h > dot_general > h
Wh.weight: traced, drops h > dot_general > h, h > dot_general > h
"""

EXPECTED["LSTMCell"] = """
group 0: h, c (2, 4)
dot_general(x, W.weight) (2, 4) as weight -> 0: h, c
dot_general(x, W.weight) (2, 4) as weight -> 0: h, c
dot_general(x, W.weight) (2, 4) as weight -> 0: h, c
dot_general(x, W.weight) (2, 4) as weight -> 0: h
broadcast_in_dim(split(W.weight)) (2, 4) as bias -> 0: h, c
broadcast_in_dim(split(W.weight)) (2, 4) as bias -> 0: h, c
broadcast_in_dim(split(W.weight)) (2, 4) as bias -> 0: h, c
broadcast_in_dim(split(W.weight)) (2, 4) as bias -> 0: h
cut: h > product with `W.weight` > h, c
W.weight: traced, drops h > dot_general > c, h > dot_general > h
"""

EXPECTED["linear_gru_linear"] = """
group 0: cell.h (2, 4)
dot_general(x, cell.Wrz.weight) (2, 4) as weight -> 0: cell.h
broadcast_in_dim(split(cell.Wrz.weight)) (2, 4) as bias -> 0: cell.h
dot_general(x, cell.Wh.weight) (2, 4) as weight -> 0: cell.h
broadcast_in_dim(cell.Wh.weight) (2, 4) as bias -> 0: cell.h
cut: cell.h, encode.weight > product with `cell.Wrz.weight` > cell.h
cut: cell.h, encode.weight, cell.Wrz.weight > product with `cell.Wh.weight` > cell.h
encode.weight: upstream, drops encode.weight > dot_general > cell.h, encode.weight > dot_general > cell.h
cell.Wrz.weight: traced, drops cell.h > dot_general > cell.h, cell.Wrz.weight > dot_general > cell.h, cell.h > dot_general > cell.h
cell.Wh.weight: traced, drops cell.h > dot_general > cell.h, cell.h > dot_general > cell.h
readout.weight: direct, exact
"""

EXPECTED["conv_module"] = """
group 0: leaky.h (2, 5, 4)
conv_general_dilated(x, conv.weight) (2, 5, 4) as weight -> 0: leaky.h
conv.weight: traced, exact
"""

EXPECTED["embedding_module"] = """
group 0: leaky.h (2, 4)
custom_vjp_call(x, table.weight) (2, 4) as weight -> 0: leaky.h
table.weight: traced, exact
"""

EXPECTED["LIF"] = """
group 0: neuron.V (2, 4)
dot_general(x, linear.weight) (2, 4) as weight -> 0: neuron.V
broadcast_in_dim(linear.weight) (2, 4) as bias -> 0: neuron.V
linear.weight: traced, exact
"""

EXPECTED["ALIF"] = """
group 0: neuron.V, neuron.a (2, 4)
dot_general(x, linear.weight) (2, 4) as weight -> 0: neuron.V
broadcast_in_dim(linear.weight) (2, 4) as bias -> 0: neuron.V
linear.weight: traced, exact
"""

EXPECTED["vmapped_module"] = """
group 0: cell.h (2, 4)
dot_general(x, cell.Wf.weight) (2, 4) as weight -> 0: cell.h
broadcast_in_dim(cell.Wf.weight) (2, 4) as bias -> 0: cell.h
dot_general(x, cell.Wh.weight) (2, 4) as weight -> 0: cell.h
broadcast_in_dim(cell.Wh.weight) (2, 4) as bias -> 0: cell.h
cut: cell.h > product with `cell.Wf.weight` > cell.h
cut: cell.h, cell.Wf.weight > product with `cell.Wh.weight` > cell.h
cell.Wf.weight: traced, drops cell.h > dot_general > cell.h, cell.Wf.weight > dot_general > cell.h, cell.h > dot_general > cell.h
cell.Wh.weight: traced, drops cell.h > dot_general > cell.h, cell.h > dot_general > cell.h
"""

EXPECTED["scalar_gate_shown"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
cut: gate > one value of `dot_general` feeds many positions > h
w: traced, exact
gate: upstream, drops gate > dot_general > h
"""

EXPECTED["fast_weights"] = """
group 0: m (2, 3, 4)
dot_general(x, wk) (2, 3, 4) as weight -> 0: m
dot_general(x, wv) (2, 3, 4) as weight -> 0: m
wk: traced, exact
wv: traced, exact
"""

EXPECTED["partial_update"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 2) as weight -> 0: h
broadcast_in_dim(b) (2, 2) as bias -> 0: h
w: traced, exact
b: traced, exact
"""

EXPECTED["split_after_softplus"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 8) as weight -> 0: h
w: traced, exact
"""

EXPECTED["interleaved_gates"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 12) as weight -> 0: h
dot_general(x, u) (2, 12) as weight -> 0: h
cut: h > product with `u` > h
w: traced, drops h > dot_general > h
u: traced, drops h > dot_general > h
"""

EXPECTED["learned_reset"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h
broadcast_in_dim(h0) (2, 4) as weight -> 0: h
w: traced, exact
h0: traced, exact
"""

EXPECTED["joined_across_an_axis"] = """
group 0: h, c (1, 2, 4)
dot_general(x, w) (2, 4) as weight -> 0: h, c
w: traced, exact
"""

EXPECTED["narrow_state"] = """
group 0: h (2, 4)
group 1: g (2, 1)
dot_general(x, w) (2, 1) as weight -> 1: g
dot_general(x, v) (2, 4) as weight -> 0: h
cut: g, w > `broadcast_in_dim` spreads positions > h
w: traced, drops g > broadcast_in_dim > h, w > broadcast_in_dim > h
v: traced, exact
"""

EXPECTED["shared_threshold"] = """
group 0: h (2, 4)
group 1: theta (4,)
dot_general(x, w) (2, 4) as weight -> 0: h
copy(a) (4,) as weight -> 1: theta
cut: theta > `broadcast_in_dim` spreads positions > h
cut: h, w > `reduce_sum` mixes positions > theta
w: traced, drops h > reduce_sum > theta, w > reduce_sum > theta
a: traced, drops theta > broadcast_in_dim > h
"""

EXPECTED["scalar_states"] = """
group 0: h ()
group 1: k (2, 4)
dot_general(x, w) (2, 4) as weight -> 1: k
cut: h > `broadcast_in_dim` spreads positions > k
w: traced, exact
a: direct, exact
"""

EXPECTED["delay_line"] = """
group 0: h (2, 4)
dot_general(x, w) (2, 1) as weight -> 0: h
cut: h > `slice` moves positions > h
w: traced, drops h > slice > h
"""
