use std::collections::BTreeMap;
use crate::target::{Rope, RopeScaling};
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig {
    pub hidden_size: usize, pub target_hidden_size: usize, pub intermediate_size: usize, pub num_attention_heads: usize,
    pub num_key_value_heads: usize, pub head_dim: usize, pub rms_norm_eps: f64, pub rope: Rope, pub max_position_embeddings: usize,
    pub vocab_size: usize, pub draft_vocab_size: usize, pub aux_layers: Vec<usize>, pub norm_before_residual: bool, pub norm_before_fc: bool,
    pub fc_norm: bool, pub norm_output: bool,
}
impl Default for DraftConfig { fn default() -> Self { Self { hidden_size: 0, target_hidden_size: 0, intermediate_size: 0, num_attention_heads: 0, num_key_value_heads: 0, head_dim: 0, rms_norm_eps: 1e-5, rope: Rope{theta:1e4, scaling: RopeScaling::None}, max_position_embeddings: 0, vocab_size: 0, draft_vocab_size: 0, aux_layers: vec![], norm_before_residual: false, norm_before_fc: false, fc_norm: false, norm_output: false } } }
impl DraftConfig { pub fn tensor_shapes(&self) -> BTreeMap<String, Vec<usize>> {
 let (h, t, n) = (self.hidden_size, self.target_hidden_size, self.aux_layers.len()); let q = self.num_attention_heads*self.head_dim; let kv = self.num_key_value_heads*self.head_dim;
 let mut m: BTreeMap<String, Vec<usize>> = [("fc.weight", vec![h, n*t]),("midlayer.self_attn.q_proj.weight", vec![q,2*h]),("midlayer.self_attn.k_proj.weight", vec![kv,2*h]),("midlayer.self_attn.v_proj.weight", vec![kv,2*h]),("midlayer.self_attn.o_proj.weight", vec![h,q]),("midlayer.mlp.gate_proj.weight", vec![self.intermediate_size,h]),("midlayer.mlp.up_proj.weight", vec![self.intermediate_size,h]),("midlayer.mlp.down_proj.weight", vec![h,self.intermediate_size]),("midlayer.input_layernorm.weight", vec![h]),("midlayer.hidden_norm.weight", vec![h]),("midlayer.post_attention_layernorm.weight", vec![h]),("norm.weight", vec![h]),("lm_head.weight", vec![self.draft_vocab_size,h])].into_iter().map(|(a,b)|(a.to_string(),b)).collect();
 if self.norm_before_fc { m.insert("input_norm.weight".into(), vec![n*t]); }
 if self.fc_norm { for i in 0..n { m.insert(format!("fc_norm.{i}.weight"), vec![t]); } }
 m } }
