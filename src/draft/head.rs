//! The draft head: its weights and the two halves of its layer.
//!
//! A head predicts from the embedding of the newest token and a *feature*: the target's three fused layers at the
//! first TTT step, its own last output afterwards. The layer is cut in two at its attention, [`DraftHead::project`]
//! before and [`DraftHead::finish`] after, because training ([`super::ttt`]) and decoding (`evaluate`) differ only in
//! which keys a query sees.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData, activation};

use super::config::DraftConfig;
use crate::target::model::rms_norm;
use crate::target::rope::rotate;

/// A weight on the host, float32, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct HostArray {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

/// A head's weights by their checkpoint names.
pub type HeadTensors = BTreeMap<String, HostArray>;

/// What is wrong with a set of head weights.
#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    /// A weight that the configuration calls for is absent.
    #[error("the head has no weight `{0}`; its config.json calls for it")]
    Missing(String),
    /// A weight has another shape than the configuration says.
    #[error("the head's weight `{name}` has shape {found:?}, its configuration says {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    /// A weight that the configuration does not know.
    #[error("the head has a weight `{0}` that its configuration does not use")]
    Unknown(String),
}

/// The weights of an EAGLE-3 draft head on a device.
///
/// Every weight is kept in rank 2: products as `[out, in]`, as checkpoints store them, and norm gains as `[1, width]`.
/// The names are those of the checkpoint (`fc.weight`, `midlayer.self_attn.q_proj.weight`, ...), so the optimizer,
/// the checkpoint and the export all walk one map.
#[derive(Debug, Clone)]
pub struct DraftHead {
    pub config: DraftConfig,
    weights: BTreeMap<String, Tensor<2>>,
}

/// Queries, keys, values and the residual of one layer input; see [`DraftHead::project`].
#[derive(Debug, Clone)]
pub struct Projected {
    /// `[queries, heads * head_dim]`, rotated.
    pub q: Tensor<2>,
    /// `[rows, kv_heads * head_dim]`, rotated.
    pub k: Tensor<2>,
    /// `[rows, kv_heads * head_dim]`.
    pub v: Tensor<2>,
    /// `[queries, hidden]`.
    pub residual: Tensor<2>,
}

/// RoPE factors, `[rows, head_dim]` each.
#[derive(Debug, Clone)]
pub struct Rotation {
    pub cos: Tensor<2>,
    pub sin: Tensor<2>,
}

impl Rotation {
    /// The factors of some of the rows.
    pub fn select(&self, rows: Tensor<1, Int>) -> Self {
        Self { cos: self.cos.clone().select(0, rows.clone()), sin: self.sin.clone().select(0, rows) }
    }
}

impl DraftHead {
    /// Puts checkpoint weights on a device.
    ///
    /// # Errors
    /// When a weight is missing, unknown or of another shape than `config` says.
    pub fn from_tensors(config: DraftConfig, tensors: &HeadTensors, device: &Device) -> Result<Self, HeadError> {
        let shapes = config.tensor_shapes();
        if let Some(name) = tensors.keys().find(|name| !shapes.contains_key(*name)) {
            return Err(HeadError::Unknown(name.clone()));
        }
        let mut weights = BTreeMap::new();
        for (name, expected) in shapes {
            let host = tensors.get(&name).ok_or_else(|| HeadError::Missing(name.clone()))?;
            if host.shape != expected {
                return Err(HeadError::Shape { name, found: host.shape.clone(), expected });
            }
            let rank2 = match expected[..] {
                [width] => [1, width],
                [rows, columns] => [rows, columns],
                _ => return Err(HeadError::Shape { name, found: host.shape.clone(), expected }),
            };
            weights.insert(name, Tensor::from_data(TensorData::new(host.data.clone(), rank2), device));
        }
        Ok(Self { config, weights })
    }

    /// The weights as checkpoints hold them.
    pub fn to_tensors(&self) -> HeadTensors {
        let shapes = self.config.tensor_shapes();
        self.weights
            .iter()
            .map(|(name, tensor)| {
                let data = tensor.to_data().convert::<f32>().try_to_vec().expect("weights are float tensors");
                (name.clone(), HostArray { shape: shapes[name].clone(), data })
            })
            .collect()
    }

    /// The same head with each weight in `names` a leaf of the autodiff graph.
    pub fn track(&self, names: &[String]) -> Self {
        let weights = self
            .weights
            .iter()
            .map(|(name, weight)| {
                let weight = weight.clone();
                let tracked = names.contains(name);
                (name.clone(), if tracked { weight.autodiff().require_grad() } else { weight })
            })
            .collect();
        Self { config: self.config.clone(), weights }
    }

    /// Every weight under its checkpoint name.
    pub fn weights(&self) -> &BTreeMap<String, Tensor<2>> {
        &self.weights
    }

    /// Replaces one weight; the shape must be the same.
    pub fn set_weight(&mut self, name: &str, weight: Tensor<2>) {
        debug_assert_eq!(self.weights[name].dims(), weight.dims());
        self.weights.insert(name.to_string(), weight);
    }

    /// A weight by its name; absent names are a programming error, since construction checked the set.
    pub fn weight(&self, name: &str) -> Tensor<2> {
        self.weights[name].clone()
    }

    fn linear(&self, x: Tensor<2>, name: &str) -> Tensor<2> {
        x.matmul(self.weight(name).transpose())
    }

    fn norm(&self, x: Tensor<2>, name: &str) -> Tensor<2> {
        rms_norm(x, self.weight(name), self.config.rms_norm_eps)
    }

    /// Fuses the target's layers into a feature: `aux` `[rows, 3 * target_hidden]`, low to high, to `[rows, hidden]`.
    pub fn fuse(&self, aux: Tensor<2>) -> Tensor<2> {
        let mut aux = aux;
        if self.config.norm_before_fc {
            aux = self.norm(aux, "input_norm.weight");
        }
        if self.config.fc_norm {
            let parts = aux.chunk(self.config.aux_layers.len(), 1);
            let normed = parts.into_iter().enumerate().map(|(i, part)| self.norm(part, &format!("fc_norm.{i}.weight")));
            aux = Tensor::cat(normed.collect(), 1);
        }
        self.linear(aux, "fc.weight")
    }

    /// The half of the layer before attention.
    ///
    /// `embeds` and `feature` are `[rows, hidden]`. Keys and values come from every row, queries and the residual
    /// only from `queries` (all rows when `None`).
    pub fn project(
        &self,
        embeds: Tensor<2>,
        feature: Tensor<2>,
        rotation: &Rotation,
        queries: Option<Tensor<1, Int>>,
    ) -> Projected {
        let normed_feature = self.norm(feature.clone(), "midlayer.hidden_norm.weight");
        let embeds = self.norm(embeds, "midlayer.input_layernorm.weight");
        let residual = if self.config.norm_before_residual { normed_feature.clone() } else { feature };
        let both = Tensor::cat(vec![embeds, normed_feature], 1);
        let k = self.rotated(self.linear(both.clone(), "midlayer.self_attn.k_proj.weight"), rotation);
        let v = self.linear(both.clone(), "midlayer.self_attn.v_proj.weight");
        let (both, residual, rotation) = match queries {
            Some(rows) => {
                let rotation = rotation.select(rows.clone());
                (both.select(0, rows.clone()), residual.select(0, rows), rotation)
            }
            None => (both, residual, rotation.clone()),
        };
        let q = self.rotated(self.linear(both, "midlayer.self_attn.q_proj.weight"), &rotation);
        Projected { q, k, v, residual }
    }

    fn rotated(&self, x: Tensor<2>, rotation: &Rotation) -> Tensor<2> {
        let [rows, width] = x.dims();
        let head_dim = self.config.head_dim;
        let x = x.reshape([rows, width / head_dim, head_dim]);
        rotate(x, rotation.cos.clone(), rotation.sin.clone()).reshape([rows, width])
    }

    /// The half of the layer after attention: `attended` `[rows, heads * head_dim]` and `residual` `[rows, hidden]`
    /// to the layer's output and that output normed, `[rows, hidden]` each.
    pub fn finish(&self, attended: Tensor<2>, residual: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let x = residual + self.linear(attended, "midlayer.self_attn.o_proj.weight");
        let normed = self.norm(x.clone(), "midlayer.post_attention_layernorm.weight");
        let gate = activation::silu(self.linear(normed.clone(), "midlayer.mlp.gate_proj.weight"));
        let up = self.linear(normed, "midlayer.mlp.up_proj.weight");
        let output = x + self.linear(gate * up, "midlayer.mlp.down_proj.weight");
        let normed = self.norm(output.clone(), "norm.weight");
        (output, normed)
    }

    /// The feature that the next step receives: the normed output under `norm_output` (EAGLE 3.1), else the raw one.
    pub fn next_feature(&self, output: Tensor<2>, normed: Tensor<2>) -> Tensor<2> {
        if self.config.norm_output { normed } else { output }
    }

    /// Logits over the draft vocabulary, `[rows, draft_vocab]`, from the normed output `[rows, hidden]`.
    pub fn logits(&self, normed: Tensor<2>) -> Tensor<2> {
        self.linear(normed, "lm_head.weight")
    }
}
