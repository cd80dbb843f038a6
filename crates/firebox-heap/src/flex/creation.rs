//! Rules for operations that create tensors without inputs.

use crate::arena::Arena;
use crate::call::{Invocation, Made, Rule};

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("_empty", make_zeros),
    ("_zeros", make_zeros),
    ("_ones", make),
    ("_full", make),
    ("_random", make),
    ("int_arange", make),
    ("int_arange_step", make),
    ("_from_data", make),
];

fn make(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

fn make_zeros(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    Ok(vec![arena.tensor_from_bytes(out.shape, out.dtype)])
}
