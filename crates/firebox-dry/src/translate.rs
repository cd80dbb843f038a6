//! Descriptions of calls in the terms of a replay: its tensor numbers and its target's element types.
//!
//! A [`Description`](firebox_trace::Description) numbers its tensors for itself, so that calls can share it, and has
//! the element types of the backend that recorded it. burn-ir offers no way to walk the tensors of an operation and
//! change them, but its operations can be serialized: as a tree, to change the element types, once for a description; and as
//! bytes of fixed places, from which each call makes its operations with numbers of its own.

use bincode::config::{Configuration, Fixint, LittleEndian};
use burn_ir::{OperationIr, TensorId};
use burn_std::{BoolStore, DType};
use serde::Deserialize;
use serde_json::{Value, json};

/// From the element types of a recording to those of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types {
    /// How the target stores booleans.
    pub(crate) bools: BoolStore,
    /// The integers that a recording has by default, and those that the target has.
    pub(crate) ints: Option<(DType, DType)>,
}

impl Types {
    /// The element type of the target.
    pub(crate) fn translate(&self, dtype: DType) -> DType {
        match (dtype, self.ints) {
            (DType::Bool(_), _) => DType::Bool(self.bools),
            (dtype, Some((from, to))) if dtype == from => to,
            (dtype, _) => dtype,
        }
    }
}

/// The operations of a description, ready to be numbered.
pub(crate) struct Template {
    operations: Vec<Encoded>,
}

/// An operation as bytes, and where in them the numbers of its tensors are, with what they are in the description. The numbers in
/// the bytes are those of the latest call.
struct Encoded {
    bytes: Vec<u8>,
    tensors: Vec<(usize, TensorId)>,
}

/// Numbers of fixed size, so that they can be written over.
const ENCODING: Configuration<LittleEndian, Fixint> =
    bincode::config::standard().with_fixed_int_encoding();

/// What is added to the numbers of a description to find them among bytes: nothing else looks like that.
const BEACON: u64 = 0x9e37_79b9_7f4a_0000;

impl Template {
    pub(crate) fn new(operations: &[OperationIr], types: &Types) -> Self {
        let encode = |operation| {
            let mut tree = serde_json::to_value(operation).expect("burn-ir's operations serialize");
            translate(&mut tree, types);
            let mut count = 0;
            each_tensor(&mut tree, &mut |id| {
                let number = TensorId::deserialize(&*id).expect("a tensor has an id").value();
                assert!(number < 1 << 16, "a description has fewer tensors");
                *id = json!(TensorId::new(BEACON + number));
                count += 1;
            });
            let operation =
                OperationIr::deserialize(&tree).expect("what was serialized can be read");
            let encoded = Encoded::new(&operation);
            assert_eq!(encoded.tensors.len(), count, "every tensor of {operation:?} is found");
            encoded
        };
        Self { operations: operations.iter().map(encode).collect() }
    }

    /// The operations with tensor `id` renamed to `number(id)`.
    pub(crate) fn number(
        &mut self,
        mut number: impl FnMut(TensorId) -> TensorId,
    ) -> impl Iterator<Item = OperationIr> {
        self.operations.iter_mut().map(move |Encoded { bytes, tensors }| {
            for (at, tensor) in tensors {
                bytes[*at..*at + size_of::<u64>()]
                    .copy_from_slice(&number(*tensor).value().to_le_bytes());
            }
            let decoded = bincode::serde::decode_from_slice(bytes, ENCODING);
            decoded.expect("what was encoded can be decoded").0
        })
    }
}

impl Encoded {
    /// An operation whose tensors have numbers from [`BEACON`] on.
    fn new(operation: &OperationIr) -> Self {
        let bytes = bincode::serde::encode_to_vec(operation, ENCODING)
            .expect("burn-ir's operations can be encoded");
        let number = |(at, word): (usize, &[u8])| {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            let number = word.checked_sub(BEACON).filter(|number| *number < 1 << 16);
            number.map(|number| (at, TensorId::new(number)))
        };
        let tensors = bytes.windows(size_of::<u64>()).enumerate().filter_map(number).collect();
        Self { bytes, tensors }
    }
}

fn translate(tree: &mut Value, types: &Types) {
    if let Some((from, to)) = types.ints
        && *tree == json!(from)
    {
        *tree = json!(to);
    }
    match tree {
        Value::Array(items) => items.iter_mut().for_each(|item| translate(item, types)),
        Value::Object(fields) => {
            if fields.len() == 1
                && let Some((key, value)) = fields.iter_mut().next()
            {
                match key.as_str() {
                    "Bool" if value.is_string() => *value = json!(types.bools),
                    // JSON has no infinity; what a scalar is does not matter to the memory.
                    "Float" if value.is_null() => *value = json!(0.0),
                    _ => {}
                }
            }
            fields.values_mut().for_each(|value| translate(value, types));
        }
        _ => {}
    }
}

/// Calls `visit` with the number of every tensor.
fn each_tensor(tree: &mut Value, visit: &mut impl FnMut(&mut Value)) {
    match tree {
        Value::Array(items) => items.iter_mut().for_each(|item| each_tensor(item, visit)),
        Value::Object(fields) => {
            let is_tensor =
                ["shape", "status", "dtype"].iter().all(|key| fields.contains_key(*key));
            if is_tensor && let Some(id) = fields.get_mut("id") {
                visit(id);
            } else {
                fields.values_mut().for_each(|value| each_tensor(value, visit));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_ir::{
        BaseOperationIr, CastOpIr, FloatOperationIr, MaskFillOpIr, ScalarIr, TensorIr, TensorStatus,
    };

    const GPU: Types = Types { bools: BoolStore::U8, ints: Some((DType::I64, DType::I32)) };

    fn tensor(id: u64, dtype: DType) -> TensorIr {
        let status = TensorStatus::ReadOnly;
        TensorIr { id: TensorId::new(id), shape: [2, 3].into(), status, dtype }
    }

    fn translated(operation: OperationIr, types: &Types) -> OperationIr {
        let mut template = Template::new(&[operation], types);
        let mut operations = template.number(|id| TensorId::new(id.value() + 100));
        operations.next().expect("one operation")
    }

    #[test]
    fn numbers_and_types_are_the_targets() {
        let bools = DType::Bool(BoolStore::Native);
        let operation = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(0, DType::F32),
            mask: tensor(1, bools),
            value: ScalarIr::Float(-2.5),
            out: tensor(2, DType::F32),
        }));
        let expected = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(100, DType::F32),
            mask: tensor(101, DType::Bool(BoolStore::U8)),
            value: ScalarIr::Float(-2.5),
            out: tensor(102, DType::F32),
        }));
        assert_eq!(translated(operation, &GPU), expected);
    }

    #[test]
    fn integers_change_only_where_the_default_does() {
        let cast = |from, to| {
            let (input, out) = (tensor(0, from), tensor(1, to));
            OperationIr::Float(DType::F32, FloatOperationIr::IntoInt(CastOpIr { input, out }))
        };
        let out = |types: &Types| {
            let operation = translated(cast(DType::F32, DType::I64), types);
            operation.outputs().next().expect("an output").dtype
        };
        assert_eq!(out(&GPU), DType::I32);
        assert_eq!(out(&Types { ints: None, ..GPU }), DType::I64);
    }

    #[test]
    fn an_infinite_scalar_survives_as_some_number() {
        let operation = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(0, DType::F32),
            mask: tensor(1, DType::Bool(BoolStore::U8)),
            value: ScalarIr::Float(f64::NEG_INFINITY),
            out: tensor(2, DType::F32),
        }));
        let names: Vec<u64> =
            translated(operation, &GPU).nodes().iter().map(|tensor| tensor.id.value()).collect();
        assert_eq!(names, [100, 101, 102]);
    }
}
