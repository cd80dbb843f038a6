//! Reads of several tensors in one call.

use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};
use burn_backend::{Backend, ExecutionError};

use crate::Lazy;
use crate::kind::Kind;
use crate::record::limits::Zeros;
use crate::record::session::read;
use crate::tensor::LazyTensor;
use crate::threads::handover::InUse;
use crate::threads::streams::{on_stream, poll_on_stream};

impl<B: Backend> TransactionOps<Self> for Lazy<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        let quantized = transaction.read_qfloats.into_iter().map(LazyTensor::into_inner).collect();
        let (floats, zeros) = read_all(transaction.read_floats);
        let (ints, int_zeros) = read_all(transaction.read_ints);
        let (bools, bool_zeros) = read_all(transaction.read_bools);
        let read = floats.zip(ints).zip(bools).map(|((floats, ints), bools)| {
            let transaction = TransactionPrimitive::new(floats, quantized, ints, bools);
            poll_on_stream::<B, _>(
                InUse::take::<B>(),
                on_stream::<B, _>(|| B::tr_execute(transaction)),
            )
        });
        async move {
            let data = |zeros: Vec<Zeros>| zeros.into_iter().map(Zeros::data).collect();
            match read {
                Some(read) => read.await,
                None => Ok(TransactionPrimitiveData {
                    read_floats: data(zeros),
                    read_qfloats: Vec::new(),
                    read_ints: data(int_zeros),
                    read_bools: data(bool_zeros),
                }),
            }
        }
    }
}

/// Reads the tensors. The values are `None` if a read is refused; the zeros then stand in for them.
fn read_all<B: Backend, K: Kind<B>>(
    tensors: Vec<LazyTensor<B, K>>,
) -> (Option<Vec<K::Primitive>>, Vec<Zeros>) {
    let zeros = tensors.iter().map(Zeros::of).collect();
    (tensors.into_iter().map(read).collect(), zeros)
}
