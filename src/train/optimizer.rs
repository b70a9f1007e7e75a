//! AdamW over named weights, with its moments in float32 under the same names.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use crate::draft::head::DraftHead;
use crate::recipe::TrainRecipe;

/// AdamW (Loshchilov and Hutter 2019), bias-corrected, decay decoupled and scaled by the learning rate.
///
/// Norm gains are not decayed.
#[derive(Debug, Clone, Default)]
pub struct AdamW {
    /// First and second moment of each trained weight.
    pub moments: BTreeMap<String, (Tensor<2>, Tensor<2>)>,
    /// Updates made.
    pub updates: usize,
}

impl AdamW {
    /// Updates every weight that has a gradient.
    pub fn update(
        &mut self,
        head: &mut DraftHead,
        gradients: BTreeMap<String, Tensor<2>>,
        lr: f64,
        recipe: &TrainRecipe,
    ) {
        self.updates += 1;
        let correction = |beta: f64| 1.0 - beta.powi(self.updates as i32);
        let (c1, c2) = (correction(recipe.beta1), correction(recipe.beta2));
        for (name, gradient) in gradients {
            let (m, v) = self.moments.remove(&name).unwrap_or_else(|| (gradient.zeros_like(), gradient.zeros_like()));
            let m = m * recipe.beta1 + gradient.clone() * (1.0 - recipe.beta1);
            let v = v * recipe.beta2 + gradient.square() * (1.0 - recipe.beta2);
            let update = m.clone() * (lr / c1) / ((v.clone() / c2).sqrt() + recipe.eps);
            let weight = head.weight(&name);
            let is_gain = weight.dims()[0] == 1;
            let weight =
                if is_gain || recipe.weight_decay == 0.0 { weight } else { weight * (1.0 - lr * recipe.weight_decay) };
            head.set_weight(&name, weight - update);
            self.moments.insert(name, (m, v));
        }
    }
}

/// Scales all gradients so that their global L2 norm is at most `limit` (0 leaves them), and gives the norm before.
pub fn clip(gradients: &mut BTreeMap<String, Tensor<2>>, limit: f64) -> f64 {
    let square = |g: &Tensor<2>| g.clone().square().sum().into_scalar::<f32>() as f64;
    let norm = gradients.values().map(square).sum::<f64>().sqrt();
    if limit > 0.0 && norm > limit && norm.is_finite() {
        for gradient in gradients.values_mut() {
            *gradient = gradient.clone() * (limit / norm);
        }
    }
    norm
}
