//! The decoder-only target in Burn: embeddings, pre-norm layers with grouped-query attention and SwiGLU, final norm,
//! head. One code path covers Llama 2/3, SmolLM2, Mistral, Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k).
//!
//! Two ways through the layers: [`TargetModel::prefill`] takes whole documents packed behind one another, and
//! [`TargetModel::step`] a few new tokens of each row of a [`KvCache`].

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData, activation};

use super::cache::{CacheStep, KvCache, heads_first, rows_first};
use super::rope::{RopeTable, rotate};
use super::{HostTensor, TargetConfig, TargetError, WeightSource};

/// Query rows that attend at once in [`TargetModel::prefill`]; bounds the score matrix.
const BLOCK: usize = 256;

/// `x / rms(x) * gain` over the last dimension (arXiv 1910.07467); `x` is `[rows, width]`, `gain` `[1, width]`.
pub fn rms_norm(x: Tensor<2>, gain: Tensor<2>, eps: f64) -> Tensor<2> {
    let inverse = (x.clone().square().mean_dim(1) + eps).sqrt().recip();
    x * inverse * gain
}

/// A host list of row numbers as an index tensor.
pub fn index(rows: impl IntoIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let rows: Vec<i32> = rows.into_iter().map(|row| row as i32).collect();
    let count = rows.len();
    Tensor::from_data(TensorData::new(rows, [count]), device)
}

/// A target on a device.
pub struct TargetModel {
    pub config: TargetConfig,
    embeddings: Tensor<2>,
    layers: Vec<Layer>,
    norm: Tensor<2>,
    /// `[hidden, vocab]`.
    head: Tensor<2>,
    rope: RopeTable,
    device: Device,
}

/// Products are kept `[in, out]`: a step of few rows would otherwise spend most of its time packing the weights.
struct Layer {
    input_norm: Tensor<2>,
    /// q, k and v beside one another, `[hidden, (heads + 2 * kv_heads) * head_dim]`: one product instead of three.
    qkv: Tensor<2>,
    qkv_bias: Option<Tensor<2>>,
    qk_norm: Option<(Tensor<2>, Tensor<2>)>,
    output: Tensor<2>,
    post_norm: Tensor<2>,
    /// gate and up beside one another, `[hidden, 2 * intermediate]`.
    gate_up: Tensor<2>,
    down: Tensor<2>,
}

/// What a pass over tokens gives.
pub struct Pass {
    /// The residual stream entering each asked-for layer, `[tokens, hidden]` each, in the order asked.
    pub aux: Vec<Tensor<2>>,
    /// The stream after the last layer, before the final norm, `[tokens, hidden]`.
    pub last: Tensor<2>,
}

/// Keys and values of packed documents, per layer, `[tokens, kv_heads * head_dim]` each, keys rotated.
pub type LayerKeys = Vec<(Tensor<2>, Tensor<2>)>;

impl TargetModel {
    /// Reads every weight and puts it on the device in float32.
    ///
    /// # Errors
    /// When a weight is missing or of another shape than the configuration says.
    pub fn load(config: &TargetConfig, source: &dyn WeightSource, device: &Device) -> Result<Self, TargetError> {
        let (h, f) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim);
        let gain = |name: &str, width: usize| {
            let host = checked(source, name, &[width])?;
            Ok(Tensor::from_data(TensorData::new(host.data, [1, width]), device))
        };
        let product = |names: &[(String, usize)], columns: usize| {
            let mut data = Vec::new();
            for (name, rows) in names {
                data.extend(checked(source, name, &[*rows, columns])?.data);
            }
            Ok::<Tensor<2>, TargetError>(in_first(data, columns, device))
        };
        let layer = |i: usize| {
            let name = |rest: &str| format!("model.layers.{i}.{rest}");
            let qkv_parts = [("q", q), ("k", kv), ("v", kv)];
            let qkv = qkv_parts.map(|(p, rows)| (name(&format!("self_attn.{p}_proj.weight")), rows));
            let qkv_bias = if config.qkv_bias {
                let mut data = Vec::new();
                for (p, rows) in qkv_parts {
                    data.extend(checked(source, &name(&format!("self_attn.{p}_proj.bias")), &[rows])?.data);
                }
                Some(Tensor::from_data(TensorData::new(data, [1, q + 2 * kv]), device))
            } else {
                None
            };
            let qk_norm = if config.qk_norm {
                let width = config.head_dim;
                Some((gain(&name("self_attn.q_norm.weight"), width)?, gain(&name("self_attn.k_norm.weight"), width)?))
            } else {
                None
            };
            Ok::<_, TargetError>(Layer {
                input_norm: gain(&name("input_layernorm.weight"), h)?,
                qkv: product(&qkv, h)?,
                qkv_bias,
                qk_norm,
                output: product(&[(name("self_attn.o_proj.weight"), h)], q)?,
                post_norm: gain(&name("post_attention_layernorm.weight"), h)?,
                gate_up: product(&[(name("mlp.gate_proj.weight"), f), (name("mlp.up_proj.weight"), f)], h)?,
                down: product(&[(name("mlp.down_proj.weight"), h)], f)?,
            })
        };
        let rows = checked(source, "model.embed_tokens.weight", &[config.vocab_size, h])?.data;
        let head = match config.tie_word_embeddings {
            true => in_first(rows.clone(), h, device),
            false => in_first(checked(source, "lm_head.weight", &[config.vocab_size, h])?.data, h, device),
        };
        let embeddings = Tensor::from_data(TensorData::new(rows, [config.vocab_size, h]), device);
        Ok(Self {
            embeddings,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
            norm: gain("model.norm.weight", h)?,
            head,
            rope: RopeTable::new(&config.rope, config.head_dim, config.max_position_embeddings.min(8192), device),
            device: device.clone(),
            config: config.clone(),
        })
    }

    /// The device its weights live on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The embedding rows, `[vocab, hidden]`.
    pub fn embeddings(&self) -> &Tensor<2> {
        &self.embeddings
    }

    /// The final norm's gain, `[1, hidden]`.
    pub fn final_norm(&self) -> &Tensor<2> {
        &self.norm
    }

    /// Some rows of the head, `[ids, hidden]`.
    pub fn head_rows(&self, ids: &[u32]) -> Tensor<2> {
        self.head.clone().select(1, index(ids.iter().map(|&id| id as usize), &self.device)).transpose()
    }

    /// Logits `[rows, vocab]` from the stream after the last layer, `[rows, hidden]`.
    pub fn logits(&self, last: Tensor<2>) -> Tensor<2> {
        rms_norm(last, self.norm.clone(), self.config.rms_norm_eps).matmul(self.head.clone())
    }

    /// Runs whole documents, packed behind one another, each attending only to itself.
    ///
    /// `aux_layers` are layer indices by the stream that *enters* them, up to and with the number of layers.
    pub fn prefill(&self, documents: &[&[u32]], aux_layers: &[usize]) -> Pass {
        self.prefill_with(documents, aux_layers, |_, _, _| {})
    }

    /// [`TargetModel::prefill`] that also hands out each layer's keys and values, for a cache.
    pub fn prefill_keys(&self, documents: &[&[u32]], aux_layers: &[usize]) -> (Pass, LayerKeys) {
        let mut keys = Vec::with_capacity(self.layers.len());
        let pass = self.prefill_with(documents, aux_layers, |_, k, v| keys.push((k, v)));
        (pass, keys)
    }

    fn prefill_with(
        &self,
        documents: &[&[u32]],
        aux_layers: &[usize],
        mut keys: impl FnMut(usize, Tensor<2>, Tensor<2>),
    ) -> Pass {
        let ids: Vec<u32> = documents.iter().flat_map(|d| d.iter().copied()).collect();
        let positions: Vec<usize> = documents.iter().flat_map(|d| 0..d.len()).collect();
        let mut start = 0;
        let ranges: Vec<Range<usize>> = documents
            .iter()
            .map(|d| {
                start += d.len();
                start - d.len()..start
            })
            .collect();
        self.run(&ids, &positions, aux_layers, |layer, q, k, v| {
            keys(layer, k.clone(), v.clone());
            self.attend_documents(q, k, v, &ranges)
        })
    }

    /// Feeds `tokens[row]` (equally many to every row of the cache) at the positions the cache keeps, and writes their
    /// keys and values to its next columns; [`KvCache::commit`] then says which of them stay.
    pub fn step(&self, tokens: &[Vec<u32>], aux_layers: &[usize], cache: &mut KvCache) -> Pass {
        let ids: Vec<u32> = tokens.iter().flatten().copied().collect();
        let heads = self.config.num_attention_heads;
        let step: CacheStep = cache.open(tokens.first().map_or(0, Vec::len), heads);
        let positions = step.positions.clone();
        self.run(&ids, &positions, aux_layers, |layer, q, k, v| cache.attend(&step, layer, q, k, v))
    }

    fn run(
        &self,
        ids: &[u32],
        positions: &[usize],
        aux_layers: &[usize],
        mut attend: impl FnMut(usize, Tensor<2>, Tensor<2>, Tensor<2>) -> Tensor<2>,
    ) -> Pass {
        let config = &self.config;
        let eps = config.rms_norm_eps;
        let (q_width, kv_width) =
            (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim);
        let (cos, sin) = self.rope.rows(positions);
        let mut x = self.embeddings.clone().select(0, index(ids.iter().map(|&id| id as usize), &self.device));
        let mut aux: Vec<Option<Tensor<2>>> = vec![None; aux_layers.len()];
        let mut keep = |layer: usize, x: &Tensor<2>| {
            for (slot, _) in aux_layers.iter().enumerate().filter(|&(_, &wanted)| wanted == layer) {
                aux[slot] = Some(x.clone());
            }
        };
        for (i, layer) in self.layers.iter().enumerate() {
            keep(i, &x);
            let mut qkv = rms_norm(x.clone(), layer.input_norm.clone(), eps).matmul(layer.qkv.clone());
            if let Some(bias) = &layer.qkv_bias {
                qkv = qkv + bias.clone();
            }
            let v = qkv.clone().narrow(1, q_width + kv_width, kv_width);
            let mut qk = [qkv.clone().narrow(1, 0, q_width), qkv.narrow(1, q_width, kv_width)];
            if let Some((q_gain, k_gain)) = &layer.qk_norm {
                for (x, gain) in qk.iter_mut().zip([q_gain, k_gain]) {
                    let [rows, width] = x.dims();
                    let heads = x.clone().reshape([rows * width / config.head_dim, config.head_dim]);
                    *x = rms_norm(heads, gain.clone(), eps).reshape([rows, width]);
                }
            }
            let [q, k] = qk.map(|x| {
                let [rows, width] = x.dims();
                let x = x.reshape([rows, width / config.head_dim, config.head_dim]);
                rotate(x, cos.clone(), sin.clone()).reshape([rows, width])
            });
            x = x + attend(i, q, k, v).matmul(layer.output.clone());
            let both = rms_norm(x.clone(), layer.post_norm.clone(), eps).matmul(layer.gate_up.clone());
            let gate = activation::silu(both.clone().narrow(1, 0, config.intermediate_size));
            let up = both.narrow(1, config.intermediate_size, config.intermediate_size);
            x = x + (gate * up).matmul(layer.down.clone());
        }
        keep(self.layers.len(), &x);
        let aux = aux.into_iter().map(|slot| slot.expect("layers are checked against the target's")).collect();
        Pass { aux, last: x }
    }

    /// Causal attention of packed documents: `q [tokens, heads * head_dim]`, `k` and `v` `[tokens, kv * head_dim]`.
    fn attend_documents(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, documents: &[Range<usize>]) -> Tensor<2> {
        let (heads, kv, dim) = (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim);
        let group = heads / kv;
        let mut outputs = Vec::new();
        for document in documents {
            let open = |x: &Tensor<2>, from: usize, rows: usize| {
                heads_first(x.clone().narrow(0, from, rows).unsqueeze_dim(0), kv, dim)
            };
            let (k, v) = (open(&k, document.start, document.len()), open(&v, document.start, document.len()));
            for from in document.clone().step_by(BLOCK) {
                let rows = BLOCK.min(document.end - from);
                let seen = from - document.start + rows;
                let q = open(&(q.clone() * (1.0 / (dim as f64).sqrt())), from, rows);
                let scores = q.matmul(k.clone().narrow(2, 0, seen).transpose());
                let scores = scores + causal_mask(rows, seen, group, &self.device);
                let weights = activation::softmax(scores, 3);
                let attended = weights.matmul(v.clone().narrow(2, 0, seen));
                outputs.push(rows_first(attended, 1, rows, heads * dim));
            }
        }
        if outputs.is_empty() { q.zeros_like() } else { Tensor::cat(outputs, 0) }
    }
}

/// 0 where a query may look and -inf where not, `[1, 1, group * rows, keys]`: query r sees `keys - rows + r + 1` keys.
fn causal_mask(rows: usize, keys: usize, group: usize, device: &Device) -> Tensor<4> {
    let mut mask = vec![0f32; rows * keys];
    for r in 0..rows {
        mask[r * keys + (keys - rows + r + 1)..(r + 1) * keys].fill(f32::NEG_INFINITY);
    }
    let mask = Tensor::<2>::from_data(TensorData::new(mask, [rows, keys]), device);
    mask.repeat_dim(0, group).unsqueeze_dims(&[0, 1])
}

/// Host rows `[out, in]` as a device tensor `[in, out]`.
fn in_first(data: Vec<f32>, columns: usize, device: &Device) -> Tensor<2> {
    let rows = data.len() / columns;
    let mut turned = vec![0.0; data.len()];
    for (row, values) in data.chunks_exact(columns).enumerate() {
        for (column, &value) in values.iter().enumerate() {
            turned[column * rows + row] = value;
        }
    }
    Tensor::from_data(TensorData::new(turned, [columns, rows]), device)
}

fn checked(source: &dyn WeightSource, name: &str, shape: &[usize]) -> Result<HostTensor, TargetError> {
    let host = source.tensor(name)?;
    if host.shape != shape {
        let reason = format!("has shape {:?}, the configuration says {shape:?}", host.shape);
        return Err(TargetError::Tensor { path: "the target".into(), name: name.into(), reason });
    }
    Ok(host)
}
