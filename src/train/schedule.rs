//! The learning rate: a pure function of the step, so that resuming needs no state.

use std::f64::consts::PI;

use crate::recipe::TrainRecipe;

/// The learning rate of optimizer step `step` (from 0) out of `total`.
///
/// It climbs linearly over `warmup * total` steps to `lr`, then falls along half a cosine to `final_lr_share * lr`.
pub fn learning_rate(recipe: &TrainRecipe, step: usize, total: usize) -> f64 {
    let warmup = (recipe.warmup * total as f64).round() as usize;
    if step < warmup {
        return recipe.lr * (step + 1) as f64 / warmup as f64;
    }
    let progress = (step - warmup) as f64 / (total - warmup).max(1) as f64;
    let cosine = 0.5 * (1.0 + (PI * progress).cos());
    recipe.lr * (recipe.final_lr_share + (1.0 - recipe.final_lr_share) * cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_then_falls_to_the_final_share() {
        let recipe = TrainRecipe { lr: 1.0, warmup: 0.1, final_lr_share: 0.1, ..Default::default() };
        assert_eq!(learning_rate(&recipe, 0, 100), 0.1);
        assert_eq!(learning_rate(&recipe, 9, 100), 1.0);
        assert_eq!(learning_rate(&recipe, 10, 100), 1.0);
        let last = learning_rate(&recipe, 99, 100);
        assert!(last > 0.1 && last < 0.11, "{last}");
    }

    #[test]
    fn a_run_of_one_step_has_a_rate() {
        assert!(learning_rate(&TrainRecipe::default(), 0, 1) > 0.0);
    }
}
