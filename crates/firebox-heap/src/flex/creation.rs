//! Rules for operations that create tensors without inputs.

use crate::arena::Arena;
use crate::call::{Invocation, Made, Rule};

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("float_empty", make_zeros),
    ("float_zeros", make_zeros),
    ("float_ones", make),
    ("float_full", make),
    ("float_random", make),
    ("int_empty", make_zeros),
    ("int_zeros", make_zeros),
    ("int_ones", make),
    ("int_full", make),
    ("int_random", make),
    ("int_arange", make),
    ("int_arange_step", make),
    ("bool_empty", make_zeros),
    ("bool_zeros", make_zeros),
    ("bool_ones", make),
    ("float_from_data", make),
    ("int_from_data", make),
    ("bool_from_data", make),
];

fn make(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

fn make_zeros(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    Ok(vec![arena.tensor_from_bytes(out.shape, out.dtype)])
}
