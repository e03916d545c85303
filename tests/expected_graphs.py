"""The graph that each model of the zoo must compile to, written by hand from the model's equations.

Read it beside `models.py`; the first line of an entry is the equation it was derived from. In the
other lines:

    group h, c (2, 4)            states joined position by position, and the shape of one; `x 2`: it holds two
    product w.T -> h             where a weight meets data, the weight as a formula of the parameters, the states it feeds
                                 (also `convolution`, `lookup`, and element by element: `bias` if
                                 only added, else `elementwise`)
      ... -> h1 and h2           states of different groups; `as (2, 12)`: when it is not one value a position
    cut h > product u > h        what arrives > why positions are lost there > the states behind it
    w, u: traced, exact          how each parameter learns; or `drops`, with the cuts in the same words (`itself`: the parameter)
    note cond_converted          any other decision

The order of the lines does not matter. `test_compiler_graph.py` evaluates the formulas on the
parameters' values.

How it was made: the zoo's first 87 entries were derived from the equations before any was compared
with the compiler (whose code was read for the words of the cuts; 14 entries, `rnn` to `matvec`, had
been seen in an older list that the compiler printed). 83 agreed at once. Two were wrong by hand
(`softmax`: taken for one call; `rolled`: for two slices), two by the compiler, since mended
(`scalar_gate_shown`: a gate lost its trace because an output reads it; `unknown_contact`: one cut
told twice). Models that were added later got their entries together with their code.
"""

from __future__ import annotations

from expected_module_graphs import MODULE_GRAPHS

EXPECTED: dict[str, str] = dict(MODULE_GRAPHS)

# Weight views
# -------------------------------------------------------------------------------------------------------

EXPECTED["rnn"] = """
# h = tanh(x w + h u + b)
group h (2, 4)
product w -> h
product u -> h
bias b -> h
cut h > product u > h
w, u, b: traced, drops h > product u > h
"""

EXPECTED["transposed"] = """
# h = h/2 + x w'
group h (2, 4)
product w.T -> h
w: traced, exact
"""

EXPECTED["sliced"] = """
# h = sigmoid(x w_left) h + x w_right
group h (2, 4)
product w[:, :4] -> h
product w[:, 4:] -> h
w: traced, exact
"""

EXPECTED["torch_gru"] = """
# r, z, n gates: three rows of blocks in each weight; every old h inside a gate passes w_hh, z h alone does not
group h (2, 4)
product w_ih.T[:, :4] -> h
product w_ih.T[:, 4:8] -> h
product w_ih.T[:, 8:] -> h
product w_hh.T[:, :4] -> h
product w_hh.T[:, 4:8] -> h
product w_hh.T[:, 8:] -> h
bias b_ih[:4] -> h
bias b_ih[4:8] -> h
bias b_ih[8:] -> h
bias b_hh[:4] -> h
bias b_hh[4:8] -> h
bias b_hh[8:] -> h
cut h > product w_hh > h
w_ih, w_hh, b_ih, b_hh: traced, drops h > product w_hh > h
"""

EXPECTED["torch_lstm"] = """
# c = f c + i g, h = o tanh(c): i, f, g reach c and through it h; o reaches h alone
group h, c (2, 4)
product w_ih.T[:, :4] -> h, c
product w_ih.T[:, 4:8] -> h, c
product w_ih.T[:, 8:12] -> h, c
product w_ih.T[:, 12:] -> h
product w_hh.T[:, :4] -> h, c
product w_hh.T[:, 4:8] -> h, c
product w_hh.T[:, 8:12] -> h, c
product w_hh.T[:, 12:] -> h
bias b[:4] -> h, c
bias b[4:8] -> h, c
bias b[8:12] -> h, c
bias b[12:] -> h
cut h > product w_hh > h, c
w_ih, w_hh, b: traced, drops h > product w_hh > h, c
"""

EXPECTED["concatenated"] = """
# h = h/2 + x [w1 w2]
group h (2, 4)
product jnp.concatenate([w1, w2], 1) -> h
w1, w2: traced, exact
"""

EXPECTED["masked"] = """
# h = h/2 + x (w * mask)
group h (2, 4)
product w * (np.arange(12).reshape(3, 4) % 2) -> h
w: traced, exact
"""

EXPECTED["tied_twice"] = """
# h = h/2 + tanh(x w) + tanh(x) w
group h (2, 4)
product w -> h
product w -> h
w: traced, exact
"""

EXPECTED["tied_layers"] = """
# h1 = h1/2 + x w, h2 = h2/2 + tanh(h1) w: the new h1 crosses w
group h1 (2, 4)
group h2 (2, 4)
product w -> h1
product w -> h2
cut h1, w > product w > h2
w: traced, drops itself > product w > h2; h1 > product w > h2
"""

EXPECTED["summed"] = """
# h = h/2 + x (w1 + w2)
group h (2, 4)
product w1 + w2 -> h
w1, w2: traced, exact
"""

EXPECTED["low_rank"] = """
# h = h/2 + x (a b)
group h (2, 4)
product a @ b -> h
a, b: traced, exact
"""

EXPECTED["normalised"] = """
# h = h/2 + x (g v / |v|), the norm of each column
group h (2, 4)
product g * v / jnp.sqrt((v**2).sum(0)) -> h
v, g: traced, exact
"""

EXPECTED["pytree"] = """
# h = h/2 + x kernel + bias, both in one ParamState
group h (2, 4)
product p["kernel"] -> h
bias p["bias"] -> h
p: traced, exact
"""

# Contacts
# -----------------------------------------------------------------------------------------------------------

EXPECTED["matvec"] = """
# h = h/2 + w x
group h (4,)
product w -> h
w: traced, exact
"""

EXPECTED["vecmat"] = """
# h = tanh(h/2 + x w)
group h (4,)
product w -> h
w: traced, exact
"""

EXPECTED["einsum_axes"] = """
# h_jk = h_jk/2 + sum_i x_i w_ijk
group h (2, 4, 2)
product w -> h
w: traced, exact
"""

EXPECTED["grouped_product"] = """
# h_go = h_go/2 + sum_i x_gi w_goi
group h (2, 2, 4)
product w -> h
w: traced, exact
"""

EXPECTED["feature_major"] = """
# h = tanh(h/2 + w x), batch last
group h (4, 2)
product w -> h
w: traced, exact
"""

EXPECTED["conv1d"] = """
# h = h/2 + x * w + b
group h (2, 5, 4)
convolution w -> h
bias b -> h
w, b: traced, exact
"""

EXPECTED["conv2d"] = """
# h = tanh(h/2 + x * w)
group h (2, 3, 4, 4)
convolution w -> h
w: traced, exact
"""

EXPECTED["conv_grouped"] = """
# h = h/2 + x * w, two groups of channels
group h (2, 5, 4)
convolution w -> h
w: traced, exact
"""

EXPECTED["conv_strided"] = """
# h = h/2 + x * w, every second place: 6 -> 3
group h (2, 3, 4)
convolution w -> h
w: traced, exact
"""

EXPECTED["conv_dilated"] = """
# h = h/2 + x * w, the kernel dilated
group h (2, 6, 4)
convolution w -> h
w: traced, exact
"""

EXPECTED["conv_recurrent"] = """
# h = tanh(x * w + h * u): the kernel u mixes places and channels of h
group h (2, 5, 4)
convolution w -> h
convolution u -> h
cut h > product u > h
w, u: traced, drops h > product u > h
"""

EXPECTED["embedding"] = """
# h = tanh(h/2 + w[x])
group h (2, 4)
lookup w -> h
w: traced, exact
"""

EXPECTED["embedding_one"] = """
# h = h/2 + w[x], one row
group h (4,)
lookup w -> h
w: traced, exact
"""

EXPECTED["decay_scalar"] = """
# h = sigmoid(a) h + x
group h (2, 4)
elementwise jax.nn.sigmoid(a) -> h
a: traced, exact
"""

EXPECTED["decay_vector"] = """
# h = d h + (1 - d) gain x + b with d = exp(-exp(a)): a meets data twice, the second time joined with gain
group h (2, 4)
elementwise jnp.exp(-jnp.exp(a)) -> h
elementwise (1 - jnp.exp(-jnp.exp(a))) * gain -> h
bias b -> h
a, gain, b: traced, exact
"""

EXPECTED["threshold"] = """
# v = 0.9 v + x + b, then v - spike(v - threshold) threshold: threshold meets data twice
group v (2, 4)
elementwise threshold -> v
elementwise threshold -> v
bias b -> v
threshold, b: traced, exact
"""

EXPECTED["scalar_gate"] = """
# h = g h + (1 - g) tanh(x w), g = sigmoid(x gate) one per row: it is spread over the row first
group h (2, 4)
product w -> h
product gate -> h
w, gate: traced, exact
"""

EXPECTED["scalar_gate_shown"] = """
# h = g h + x w as above; that g is also an output changes nothing in the recurrence
group h (2, 4)
product w -> h
product gate -> h
w, gate: traced, exact
"""

EXPECTED["scalar_gate_kept"] = """
# h = sigmoid(x gate) h + x w, g = g/2 + x gate: the product is made twice, spread over h and as it is for g
group h (2, 4)
group g (2, 1)
product w -> h
product gate -> h
product gate -> g
w, gate: traced, exact
"""

EXPECTED["conv_gate"] = """
# h = sigmoid(x * gate) h + x * w: one gate a place, spread over the channels
group h (2, 5, 4)
convolution w -> h
convolution gate -> h
w, gate: traced, exact
"""

EXPECTED["embedding_gate"] = """
# h = sigmoid(gate[x]) h + w[x]: one gate a row
group h (2, 4)
lookup w -> h
lookup gate -> h
w, gate: traced, exact
"""

EXPECTED["fast_weights"] = """
# m_kv = (1 - k_k) m_kv + k_k v_v: keys are spread along the last axis, values along the middle one
group m (2, 3, 4)
product wk -> m
product wv -> m
wk, wv: traced, exact
"""

EXPECTED["partial_update"] = """
# h = 0.9 h, and its first two places + x w + b
group h (2, 4)
product w -> h as (2, 2)
bias b -> h as (2, 2)
w, b: traced, exact
"""

EXPECTED["split_after_softplus"] = """
# h = exp(-rate) h + drive, both halves of softplus(x w): that call is not split, so one product of two values a position
group h (2, 4)
product w -> h as (2, 8)
w: traced, exact
"""

EXPECTED["interleaved_gates"] = """
# a GRU whose three gates lie side by side in every position, so one product of three values a position
group h (2, 4)
product w -> h as (2, 12)
product u -> h as (2, 12)
cut h > product u > h
w, u: traced, drops h > product u > h
"""

EXPECTED["learned_reset"] = """
# h = h0 where x is positive, else h/2 + x w
group h (2, 4)
product w -> h
elementwise h0 -> h
w, h0: traced, exact
"""

EXPECTED["unknown_contact"] = """
# h = h/2 + (w + 3)^-1 x + cumsum(u x): no rule for the solve; the running sum mixes positions behind u x
group h (2, 4)
cut w > custom_linear_solve unknown > h
cut u > cumsum mixes > h
w: upstream, drops itself > custom_linear_solve unknown > h
u: upstream, drops itself > cumsum mixes > h
note unknown_contact w
"""

EXPECTED["feeds_two_ways"] = """
# h_j = h_j/2 + y_j + y_(-j), y = x w: each value of the product enters two positions, so it is made twice
group h (2, 4)
product w -> h
product w -> h
w: traced, exact
"""

EXPECTED["feeds_two_states_of_a_group"] = """
# u = tanh(x w + b), c = 0.9 c + u, h_j = h_j c_j / 2 + u_(j-1): one place of c, another of h
group h, c (2, 4)
product w -> c
product w[:, :3] -> h as (2, 3)
product w[:, 3:] -> h as (2, 1)
bias b -> c
bias b[:3] -> h as (2, 3)
bias b[3:] -> h as (2, 1)
w, b: traced, exact
"""

EXPECTED["feeds_both_signs"] = """
# u = softplus(x w) b, h = h/2 + [tanh(u), sigmoid(-u)]: each half has its own copy of u
group h (2, 8)
product w -> h as (2, 4)
product w -> h as (2, 4)
elementwise b -> h as (2, 4)
elementwise b -> h as (2, 4)
w, b: traced, exact
"""

EXPECTED["spread_twice"] = """
# g = x gate of one value, h = sigmoid(g) h + 1, k = g k + 2, and g is an output: three copies of it, two of them spread
group h (2, 4)
group k (2, 8)
product gate -> h
product gate -> k
gate: traced, exact
"""

EXPECTED["feeds_too_many_ways"] = """
# h_j = h_j/2 + sum over k of y_(j-k) / (k+1), y = x w: 17 copies of the product would be too many
group h (2, 17)
cut w > dot_general feeds many > h
w: upstream, drops itself > dot_general feeds many > h
"""

# Hidden groups
# ------------------------------------------------------------------------------------------------------

EXPECTED["alif"] = """
# i = 0.6 i + x w, v = 0.9 v + i - 0.3 a, z = spike(v); v - z, a = 0.8 a + z: the current reaches all three
group v, i, a (2, 4)
product w -> v, i, a
w: traced, exact
"""

EXPECTED["five_states"] = """
# a = tau a + x w, b = tanh(b + new a), c = c cos(b) + d, d = sin(a) + 0.3 d, e = e/2 + new b new c; c and d read old values
group a, b, c, d, e (2, 4)
product w -> a, b, e
elementwise tau -> a, b, e
w, tau: traced, exact
"""

EXPECTED["group_state"] = """
# i = 0.6 i + x w, v = 0.9 v + i - a^2, a = 0.8 a + v, the three in one HiddenGroupState
group h (2, 4) x 3
product w -> h
w: traced, exact
note state_packed h
"""

EXPECTED["two_shapes"] = """
# h = h/2 + x w, k = tanh(k/2 + x u + new h mix)
group h (2, 4)
group k (2, 6)
product w -> h
product u -> k
product mix -> k
cut h, w > product mix > k
w: traced, drops itself > product mix > k; h > product mix > k
u, mix: traced, exact
"""

EXPECTED["three_in_one"] = """
# h = n y where h > c, else h; c = c + new h, n = 0.9 n: c is only compared, which passes no gradient
group h, n (2, 4)
group c (2, 4)
product w -> h
w: traced, exact
note state_unused c
"""

EXPECTED["stacked"] = """
# h1 = tanh(x w1 + h1 u1), h2 = tanh(new h1 w2 + h2 u2): the old h1 is lost in u1 already, the new one in w2
group h1 (2, 4)
group h2 (2, 4)
product w1 -> h1
product u1 -> h1
product w2 -> h2
product u2 -> h2
cut h1 > product u1 > h1
cut w1, u1 > product w2 > h2
cut h2 > product u2 > h2
w1, u1: traced, drops itself > product w2 > h2; h1 > product u1 > h1
w2, u2: traced, drops h2 > product u2 > h2
"""

EXPECTED["skip_joined"] = """
# h1 = h1/2 + x w1, h2 = tanh(h2/2 + x w2 + new h1): added position by position
group h1, h2 (2, 4)
product w1 -> h1, h2
product w2 -> h2
w1, w2: traced, exact
"""

EXPECTED["joined_across_an_axis"] = """
# c = c/2 + (x w) h, h = tanh(new c + h); h has a leading axis of one
group h, c (1, 2, 4)
product w -> h, c
w: traced, exact
"""

EXPECTED["narrow_state"] = """
# g = g/2 + x w, one per row; h = sigmoid(new g) h + x v
group h (2, 4)
group g (2, 1)
product v -> h
product w -> g
cut g, w > broadcast_in_dim spreads > h
w: traced, drops itself > broadcast_in_dim spreads > h; g > broadcast_in_dim spreads > h
v: traced, exact
"""

EXPECTED["shared_threshold"] = """
# h = 0.9 h + x w - theta, theta = 0.9 theta + a mean over the batch of new h: one theta for all rows
group h (2, 4)
group theta (4,)
product w -> h
elementwise a -> theta
cut theta > broadcast_in_dim spreads > h
cut h, w > reduce_sum mixes > theta
w: traced, drops itself > reduce_sum mixes > theta; h > reduce_sum mixes > theta
a: traced, drops theta > broadcast_in_dim spreads > h
"""

EXPECTED["scalar_states"] = """
# k = k/2 + x w + h, h = 0, output a k: the one number h is spread over k, but no parameter reaches it
group h ()
group k (2, 4)
product w -> k
cut h > broadcast_in_dim spreads > k
w: traced, exact
a: direct
"""

EXPECTED["unused_state"] = """
# h = h/2 + x w; idle stays as it is, spare is read behind a stop_gradient
group h (2, 4)
group idle (2, 4)
product w -> h
w: traced, exact
spare: unused
note state_unused idle
"""

EXPECTED["only_written"] = """
# h = h/2 + x w, last = tanh(new h), count = count + new h; only h is read by an output
group h (2, 4)
group last (2, 4)
group count (2, 4)
product w -> h
w: traced, exact
note state_only_written last
note state_unused count
"""

EXPECTED["two_groups_one_weight"] = """
# h1 = h1/2 + x w, h2 = 0.9 h2 sigmoid(x w): one product, two groups
group h1 (2, 4)
group h2 (2, 4)
product w -> h1 and h2
w: traced, exact
"""

EXPECTED["lstm_unbatched"] = """
# an LSTM on one weight of [x h]; gates i, f, g reach c and through it h, o reaches h
group h, c (4,)
product w[:, :4] -> h, c
product w[:, 4:8] -> h, c
product w[:, 8:12] -> h, c
product w[:, 12:] -> h
cut h > product w > h, c
w: traced, drops h > product w > h, c
"""

EXPECTED["vmapped"] = """
# h = tanh(w x + u h), for each row
group h (2, 4)
product w -> h
elementwise u -> h
w, u: traced, exact
"""

# Cuts
# ---------------------------------------------------------------------------------------------------------------

EXPECTED["layer_norm"] = """
# y = h/2 + x w, h = tanh((y - mean y) / std y * g + b): y itself stays in place, its two statistics mix the row
group h (2, 4)
product w -> h
elementwise g -> h
bias b -> h
cut h, w > reduce_sum mixes > h
cut h, w > reduce_sum mixes > h
w: traced, drops itself > reduce_sum mixes > h; h > reduce_sum mixes > h
g, b: traced, drops h > reduce_sum mixes > h
"""

EXPECTED["softmax"] = """
# h = h/2 + exp(h) / sum exp(h) + x w: the numerator stays in place, the sum mixes the row; the maximum is behind a stop_gradient
group h (2, 4)
product w -> h
cut h > reduce_sum mixes > h
w: traced, drops h > reduce_sum mixes > h
"""

EXPECTED["rolled"] = """
# h_j = tanh(h_j/2 + 0.3 h_(j-1) + x w): the roll splits h in two and puts the pieces together the other way round
group h (2, 4)
product w -> h
cut h > split moves > h
w: traced, drops h > split moves > h
"""

EXPECTED["delay_line"] = """
# h = [x w, h without its last place]: every old value moves on by one
group h (2, 4)
product w -> h as (2, 1)
cut h > slice moves > h
w: traced, drops h > slice moves > h
"""

EXPECTED["max_pool"] = """
# h = h/2 + 0.2 max of the neighbours + x w
group h (2, 6)
product w -> h
cut h > reduce_window_max mixes > h
w: traced, drops h > reduce_window_max mixes > h
"""

EXPECTED["sorted_state"] = """
# h = h/2 + 0.2 sort(h) + x w
group h (2, 4)
product w -> h
cut h > sort mixes > h
w: traced, drops h > sort mixes > h
"""

EXPECTED["mean_field"] = """
# h = tanh(h/2 + u mean(h) + x w)
group h (2, 4)
product w -> h
elementwise u -> h
cut h > reduce_sum mixes > h
w, u: traced, drops h > reduce_sum mixes > h
"""

EXPECTED["encoder_readout"] = """
# h = h/2 + tanh(x w_in + b_in) w, output tanh(h) w_out + b_out: the encoder reaches h only through w
group h (2, 4)
product w -> h
cut w_in, b_in > product w > h
w: traced, exact
w_in, b_in: upstream, drops itself > product w > h
w_out, b_out: direct
"""

EXPECTED["reads_old_state"] = """
# h = tanh(h/2 + x w), output old h w_out + part of new h
group h (2, 4)
product w -> h
w: traced, exact
w_out: direct
"""

EXPECTED["carried_elsewhere"] = """
# h = h/2 + x w, slow = 0.9 slow + 0.1 new h, and slow is a ShortTermState, which gets no trace
group h (2, 4)
product w -> h
w: traced, drops itself > no HiddenState > slow; h > no HiddenState > slow
"""

# Aliases and packed states
# ------------------------------------------------------------------------------------------

EXPECTED["packed_concat"] = """
# c = sigmoid(f) c + g, h = tanh(new c + h), [h c] in one state
group hc (2, 4) x 2
product w[:, :4] -> hc
product w[:, 4:] -> hc
w: traced, exact
note state_packed hc
"""

EXPECTED["packed_stack"] = """
# c = c/2 + x w, h = tanh(new c + h), stacked along a last axis
group hc (2, 4) x 2
product w -> hc
w: traced, exact
note state_packed hc
"""

EXPECTED["leading_axis"] = """
# h = tanh(h/2 + x w) with a leading axis of one, output h w_out
group h (1, 2, 4)
product w -> h
w: traced, exact
w_out: direct
"""

EXPECTED["transposed_alias"] = """
# h = tanh(h/2 + x w), kept transposed
group h (4, 2)
product w -> h
w: traced, exact
w_out: direct
"""

EXPECTED["sliced_alias"] = """
# h = tanh(h/2 + x w), the output reads half of it
group h (2, 8)
product w -> h
w: traced, exact
w_out: direct
"""

# Control flow
# -------------------------------------------------------------------------------------------------------

EXPECTED["jitted"] = """
# h = tanh(x w + h u) inside jit
group h (2, 4)
product w -> h
product u -> h
cut h > product u > h
w, u: traced, drops h > product u > h
"""

EXPECTED["cond"] = """
# h = h/2 + (tanh(x w) or x w2)
group h (2, 4)
product w -> h
product w2 -> h
w, w2: traced, exact
note cond_converted
"""

EXPECTED["switch"] = """
# h = h/2 + x w, or h + b, or tanh(h b)
group h (2, 4)
product w -> h
bias b -> h
elementwise b -> h
w, b: traced, exact
note cond_converted
"""

EXPECTED["short_scan"] = """
# three times h = tanh(h/2 + k x w + b): the product is made once, b is added three times
group h (2, 4)
product w -> h
bias b -> h
bias b -> h
bias b -> h
w, b: traced, exact
note scan_unrolled
"""

EXPECTED["long_scan"] = """
# h = h/2 + total (x w), total from a loop over the input alone
group h (2, 4)
product w -> h
w: traced, exact
note scan_opaque
"""

EXPECTED["while_loop"] = """
# h = h/2 + (x w) / scale, scale from a loop over the input alone
group h (2, 4)
product w -> h
w: traced, exact
note while_opaque
"""

EXPECTED["spiking_jvp"] = """
# v = 0.9 v + x w + spike(v) u, then v - spike(v)
group v (2, 4)
product w -> v
product u -> v
cut v > product u > v
w, u: traced, drops v > product u > v
"""

EXPECTED["spiking_vjp"] = """
# v = 0.9 v (1 - spike(v)) + x w
group v (2, 4)
product w -> v
w: traced, exact
"""
