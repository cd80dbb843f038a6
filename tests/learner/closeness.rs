//! Compares two gradients with the bound that every split must keep.

/// Values of a model's parameters or their gradients, in the order of its fields.
pub type Values = Vec<Vec<f32>>;

/// Euclidean norm over all values.
pub fn norm(values: &[Vec<f32>]) -> f64 {
    values.iter().flatten().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

/// `a` minus `b`.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> Values {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a - b).collect()).collect()
}

/// Checks the bound: 1e-5 of the whole gradient, and 1e-5 of each tensor whose norm is at least a
/// thousandth of the whole.
pub fn compare(whole: &[Vec<f32>], split: &[Vec<f32>]) -> Result<(), String> {
    let total = norm(whole);
    if total < 1e-3 {
        return Err(format!("there is no gradient to compare with: its norm is {total:e}"));
    }
    let apart = difference(split, whole);
    if norm(&apart) > 1e-5 * total {
        return Err(format!("{:e} of {total:e} apart", norm(&apart)));
    }
    for (at, (tensor, apart)) in whole.iter().zip(&apart).enumerate() {
        let size = norm(std::slice::from_ref(tensor)).max(1e-3 * total);
        let apart = norm(std::slice::from_ref(apart));
        if apart > 1e-5 * size {
            return Err(format!("tensor {at}: {apart:e} of {size:e} apart, {total:e} in all"));
        }
    }
    Ok(())
}
